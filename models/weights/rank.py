"""The weights of one rank, in the form that it computes with, streamed layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import torch

from ess.errors import BadInput
from ess.models.weights.blocks import dequantise
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.expected.shapes import Spec
from ess.models.weights.expected.split import Split, Window
from ess.models.weights.kept import Fp8Weight

Form = Literal["stored", "bf16", "f32"]
_DTYPES: Final = {"bf16": torch.bfloat16, "f32": torch.float32}


class RankWeights:
    """`form` "stored" keeps fp8 weights beside their `scale`; "bf16" and "f32" dequantise.

    In "bf16" the norms and the gate's correction stay as they are stored (f32 in DeepSeek's files):
    they are small, and rounding them would change the model.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, split: Split | None = None, form: Form = "bf16"
    ) -> None:
        if form not in ("stored", *_DTYPES):
            raise BadInput(f"form is {form!r}, expected 'stored', 'bf16' or 'f32'")
        self.split = split or Split()
        self.split.check(checkpoint.model_config)
        self._checkpoint = checkpoint
        self._form = form
        expert_count = checkpoint.model_config.expert_count
        self._specs = {
            name: spec
            for name, spec in checkpoint.specs.items()
            if self.split.holds(spec, expert_count=expert_count)
        }
        for spec in self._specs.values():
            self._window(spec)

    def names(self, layer: int | None = None) -> list[str]:
        """The tensors of one layer, or of the outside of the stack, that this rank holds."""
        return [name for name, spec in self._specs.items() if spec.layer == layer]

    def tensor(self, name: str) -> torch.Tensor:
        spec = self._spec(name)
        window = self._window(spec)
        whole = self._checkpoint.stored(name)
        part = whole if window is None else _narrow(whole, window)
        if self._form == "stored":
            return part.contiguous()
        dtype = _DTYPES[self._form]
        if self._checkpoint.blocked(name):
            return dequantise(part, self.scale(name), dtype=dtype)
        kept = ("numbers", "norm", "correction") if self._form == "bf16" else ("numbers",)
        keep = spec.role in kept
        return part.contiguous() if keep else part.to(dtype).contiguous()

    def keeps_blocks(self, name: str) -> bool:
        """Does this weight stay in blocks of fp8?"""
        return self._form == "stored" and self._checkpoint.blocked(self._spec(name).name)

    def kept(self, name: str) -> Fp8Weight:
        assert self.keeps_blocks(name), f"{name} is not in blocks in form {self._form}"
        return Fp8Weight(self.tensor(name), self.scale(name))

    def scale(self, name: str) -> torch.Tensor:
        """The f32 scales of this rank's part of an fp8 weight."""
        window = self._window(self._spec(name))
        if not self._checkpoint.blocked(name):
            raise BadInput(f"{self._checkpoint.entry(name)} is not stored in fp8 blocks")
        scale = self._checkpoint.scale(name)
        return scale if window is None else _narrow(scale, window.scales()).contiguous()

    def stream(self) -> Iterator[tuple[int | None, dict[str, torch.Tensor]]]:
        """The outside of the stack, then layer by layer: one layer's tensors at a time."""
        layers: dict[int | None, list[str]] = {}
        for name, spec in self._specs.items():
            layers.setdefault(spec.layer, []).append(name)
        for layer, names in layers.items():
            yield layer, {name: self.tensor(name) for name in names}

    def _spec(self, name: str) -> Spec:
        if name not in self._specs:
            held = name in self._checkpoint.specs
            why = "is on another expert-parallel rank" if held else "is not of this model"
            raise BadInput(f"tensor {name[:200]!r} {why}")
        return self._specs[name]

    def _window(self, spec: Spec) -> Window | None:
        return self.split.window(spec, blocked=self._checkpoint.blocked(spec.name))


def _narrow(tensor: torch.Tensor, window: Window) -> torch.Tensor:
    return tensor.narrow(window.dim, window.begin, window.end - window.begin)
