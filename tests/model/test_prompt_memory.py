"""What a prompt chunk makes on its way does not grow with the tokens before it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.models.load import load_model
from tests.model.grid import text

CHUNK = 64


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that torch makes meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not op.is_view:
            self.bytes = max(self.bytes, made.nbytes)
        return made


def test_no_tensor_of_a_chunk_grows_with_the_context():
    model = load_model()
    layout = model.config.layout()
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.page_bytes * 20,
        host_bytes=70 * layout.host_page_bytes,
        length_max=4096,
        sequence_max=1,
        slot_floor=64,
    )
    engine = Engine(model, offload, EngineConfig(chunk_tokens=CHUNK, max_running=1, warm=False))
    engine.add((text("embedded") * 20)[:2049], Sampling(tokens_max=1))
    engine.step()
    largest = []
    for _ in range(30):
        with Largest() as seen:
            engine.step()
        largest.append(seen.bytes)
    attended = CHUNK * model.config.head_count * model.config.latent_dim * 4
    assert set(largest) == {attended}, "what attention gives of a chunk"
    offload.close()
