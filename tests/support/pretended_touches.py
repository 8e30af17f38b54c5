"""What a call of torch, or of an op of a backend, reads and writes; told to the watch for races.

A touch is a tensor, or a tensor with parts of it: where they begin and how long each one is, in
elements. Results that are views of what is given touch nothing.
"""

from __future__ import annotations

import inspect

import torch

from ess.units import PAGE_ROWS

LOOKS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "__array__"}
BY_ROW = {"index_select", "index_copy_", "index_add_", "index_fill_"}
BY_NUMBER = {"gather", "scatter_", "scatter_add_"}
UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided"}
AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor")}
EXTENT_MAX = 1 << 22
LISTS = tuple, list  # a union of both would be made anew at each look


def leaves(thing):
    """Torch's own walk over trees takes longer than most calls whose arguments it looks at."""
    tensors = []
    for each in (thing,) if isinstance(thing, torch.Tensor) else inner(thing):
        if isinstance(each, torch.Tensor):
            tensors.append(each)
        elif inner(each):
            tensors += leaves(each)
    return tensors


def inner(thing):
    """What lies directly in a tree."""
    if isinstance(thing, LISTS):
        return thing
    return thing.values() if isinstance(thing, dict) else ()


def is_inplace(name):
    return name in ("__setitem__", *AUGMENTED) or (name[-1] == "_" and name[-2:] != "__")


# ---- parts of a tensor


def runs(tensor):
    """Where dense pieces of it begin, and how long each one is."""
    sizes = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
    sizes.sort(key=lambda pair: -pair[1])
    run = 1
    while sizes and sizes[-1][1] == run:
        run *= sizes.pop()[0]
    offsets = torch.zeros(1, dtype=torch.int64)
    for count, step in sizes:
        offsets = (offsets.unsqueeze(1) + torch.arange(count) * step).reshape(-1)
    return offsets, run


def slices(tensor, axis, chosen):
    """The slices across an axis that `chosen` numbers."""
    chosen = chosen.reshape(-1).long().unique()
    if not tensor.numel() or not len(chosen):
        return tensor, (torch.empty(0, dtype=torch.int64), 0)
    offsets, run = runs(tensor.select(axis, 0))
    return tensor, (chosen.unsqueeze(1) * tensor.stride(axis) + offsets, run)


def elements(tensor, pick):
    """The elements that `pick` takes of it."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel() or extent > EXTENT_MAX:
        return tensor
    numbers = torch.arange(extent).as_strided(tensor.shape, tensor.stride())
    return tensor, (pick(numbers), 1)


# ---- calls of torch


def of_torch(name, args, kwargs, result):
    """Reads, writes, and what of the result is new memory."""
    given, target = leaves((args, kwargs)), leaves(kwargs.get("out"))
    if args and is_inplace(name):
        target.append(args[0])
    known = {each.untyped_storage().data_ptr() for each in given}
    fresh = [t for t in leaves(result) if t.untyped_storage().data_ptr() not in known]
    if name == "__get__" or not (target or fresh or name in LOOKS):
        return [], [], []
    part = picked(name, args, kwargs)
    written = {id(each) for each in target}
    reads = [each for each in given if id(each) not in written]
    writes = target + (fresh if name not in UNWRITTEN else [])
    if part is not None:
        (writes if target else reads)[0] = part
    return reads, writes, fresh


def picked(name, args, kwargs):
    """The part of the first tensor that a call by numbers touches; None for all of it."""
    if name in BY_ROW:
        return slices(args[0], *signed(args[1:], kwargs))
    if name in BY_NUMBER:
        axis, index = signed(args[1:], kwargs)
        return elements(args[0], lambda numbers: numbers.gather(axis, index.long()))
    if name == "take_along_dim":
        return elements(args[0], lambda numbers: torch.take_along_dim(numbers, *args[1:], **kwargs))
    if name in ("__getitem__", "__setitem__"):
        return elements(args[0], lambda numbers: numbers[args[1]])
    return None


def signed(args, kwargs):
    """The axis and the numbers."""
    named = dict(zip(("dim", "index"), args, strict=False)) | kwargs
    return named["dim"], named["index"]


# ---- ops of a backend


def of_kernel(name, function, given, result):
    """The same. What has a rule reads or writes what its ids name; of the rest it is all."""
    named = dict(zip(inspect.signature(function).parameters, given, strict=True))
    rule = RULES.get(name)
    reads, writes = rule(**named) if rule else whole(**named)
    fresh = leaves(result)
    return reads, [*writes, *fresh], fresh


def whole(**named):
    writes = leaves((named.pop("out", None), named.pop("into", None)))
    writes += leaves(getattr(named.get("call"), "out", None))
    known = {id(each) for each in writes}
    return [each for each in leaves(named) if id(each) not in known], writes


def of_attend(call):
    reads = [call.queries, call.slots, slices(call.rows, 0, call.slots[call.slots >= 0])]
    if call.placed is not None:
        reads.append(slices(call.placed, 0, -2 - call.slots[call.slots < -1]))
    into = [call.into.out, call.into.lse]
    return [*reads, *(into if call.adds else [])], into


def of_index(call, out, **_):
    seen = torch.arange(call.page_table.shape[1]) * PAGE_ROWS < call.lengths.unsqueeze(1)
    pages = slices(call.pages, 0, call.page_table[seen])
    return [call.queries, call.weights, call.page_table, call.lengths, pages], [out]


def of_rows(values, codec, out, places, finish=None):
    rows = out if places is None else slices(out, 0, places[places >= 0])
    return leaves((values, finish, places)), [rows]


def of_keys(values, codec, row_ids, out=None, pages=None, finish=None):
    pages = out if pages is None else pages
    touched = pages if row_ids is None else slices(pages, 0, row_ids[row_ids >= 0] // PAGE_ROWS)
    return leaves((values, finish, row_ids)), [touched]


def of_draw(scores, draws, tokens):
    return [scores, *draws], [tokens]


RULES = {
    "attend": of_attend,
    "index_logits": of_index,
    "index_top_k": of_index,
    "index_scored": of_index,
    **dict.fromkeys(("store_rows", "finish_rows"), of_rows),
    "finish_keys": of_keys,
    "draw": of_draw,
}
