"""The stages of one layer in one decode step: what `overlap`'s schedules put in order.

This is where the model meets the door and the kernels.
"""

from __future__ import annotations

from torch import Tensor

from ess.engine.layers.batch import queries
from ess.engine.layers.front import stored
from ess.engine.layers.selected import SelectedRows
from ess.engine.step.half import Half
from ess.errors import BadState
from ess.models.decoder import DecoderLayer
from ess.overlap.timeline import Timeline, timed


class LayerStep(SelectedRows):
    """`Stages` for a decoder layer, made with the layer's input."""

    def __init__(
        self,
        half: Half,
        layer: DecoderLayer,
        hidden: Tensor,
        timeline: Timeline,
        *,
        waits: bool,
    ) -> None:
        super().__init__(half, layer.number, timeline, window=layer.window, waits=waits)
        self._layer = layer
        self._hidden = hidden

    @timed
    def index(self) -> None:
        self._asking = stored(self._batch, self._layer, self._hidden, self._half.queries)

    @timed
    def pre_attn(self) -> None:
        if self._asking is None:
            raise BadState("index comes before pre_attn")
        self._queries = queries(self._batch, self._layer, self._asking.query)

    def attend_truth(self) -> Tensor:
        """This layer's attention over the host's own rows: for verify mode."""
        return self._layer.mla.attended(self.attend_host())
