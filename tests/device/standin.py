"""An offload of the host that looks like one of the pretended device: its memory has the mark."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ess.door import Offload, Sequence, checks
from ess.door.sequences.sequence import key_layer
from tests.support.pretended import PRETENCE, is_there


def marked(array, there=True):
    """The same memory."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array.detach()
    tensor = tensor.view(tensor.shape)
    tensor.is_there = there
    return tensor


class StandInStep:
    def __init__(self, step):
        self._step = step

    def __getattr__(self, name):
        value = getattr(self._step, name)
        return marked(value) if isinstance(value, np.ndarray | torch.Tensor) else value

    def resolve(self, *args, **kwargs):
        where = self._step.resolve(*args, **kwargs)
        names = ("hit", "miss", "place", "slots", "hit_count", "miss_count", "place_count")
        return replace(where, **{name: marked(getattr(where, name)) for name in names})

    def locate(self, layer, selection, *, queries=None):
        listed = queries if not isinstance(queries, torch.Tensor) else marked(queries, False)
        listed = listed.tolist() if isinstance(listed, torch.Tensor) else listed
        return marked(self._step.locate(layer, selection, queries=listed))

    def locate_all(self, *args, **kwargs):
        slots = self._step.locate_all(*args, **kwargs)
        return None if slots is None else marked(slots)

    def places(self, *args, **kwargs):
        return marked(self._step.places(*args, **kwargs))

    def host_codes(self, *args, **kwargs):
        return marked(self._step.host_codes(*args, **kwargs))

    def seal(self, *, accepted):
        self._step.seal(accepted=marked(accepted, False).tolist())


def placed(sequence, layer, start, keys):
    number, rows = key_layer(sequence.owner.pools.layout, layer), sequence.holding.row_ids
    pages = sequence.owner.pools.index
    pages.write_keys(number, rows(start, len(keys)), marked(keys, False).numpy())


class StandIn:
    def __init__(self, offload):
        self._offload = offload
        self._view = checks._view
        self._place_keys, Sequence.place_keys = Sequence.place_keys, placed
        checks._view = lambda value, name, dtype: self._view(
            marked(value, False) if is_there(value) else value, name, dtype
        )

    def __getattr__(self, name):
        return getattr(self._offload, name)

    def begin(self, sequences, **kwargs):
        return StandInStep(self._offload.begin(sequences, **kwargs))

    def memory(self, layer):
        memory = self._offload.memory(layer)
        PRETENCE.pinned |= {memory.host.untyped_storage().data_ptr()}
        return replace(memory, slots=marked(memory.slots), key_pages=marked(memory.key_pages))

    def close(self):
        self._offload.close()
        checks._view, Sequence.place_keys = self._view, self._place_keys


def opened(*args, **kwargs):
    return StandIn(Offload.create(*args, **kwargs))
