"""Each member of a team attends for some of the heads; the rest of a layer all members compute in
the same way.

Values of all heads are gathered, and then every member has the whole output projection: a sum runs
over the heads in the order of a rank alone. Sums of the members' own projections would be half as
many bytes, and would add up in an order that follows from their number.
"""

from __future__ import annotations

from torch import Tensor

from ess.comm.team import Team
from ess.engine.layers.batch import Shared, values
from ess.engine.prompt.share import Whole, Work
from ess.models.decoder import DecoderLayer
from ess.pool.latent import LatentPool


class AllMake(Whole):
    """`Share` of a pack of prompts: each member makes all rows for itself, and member 0 writes them
    where all members read them."""

    def __init__(self, latent: LatentPool) -> None:
        self._latent = latent

    def stored(self, work: Work, layer: int) -> None:
        self._latent.say()


class TeamHeads(AllMake):
    """Also the `Heads` of a decode step."""

    def __init__(self, team: Team, latent: LatentPool) -> None:
        super().__init__(latent)
        self._team = team

    def joined(self, batch: Shared, layer: DecoderLayer, attended: Tensor) -> Tensor:
        own = values(batch, layer, attended).contiguous()
        return self._team.all_gather(own, dim=1, sizes=[own.shape[1]] * self._team.size)

    def exchanged(self, work: Work, layer: DecoderLayer, attended: Tensor) -> Tensor:
        return self.joined(work.asked, layer, attended)
