"""How a sequence is opened: on the device or beside it, with what is cached of its text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ess.array_types import PageIds
from ess.door.memory.pools import Pools
from ess.door.owner import Owner
from ess.door.sequences.progress import Start
from ess.door.sequences.sequence import Sequence
from ess.layout import ModelLayout
from ess.pool.disk.tier import Claim
from ess.pool.ledger import Promise
from ess.pool.prefix import root_hash
from ess.units import PAGE_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a sequence is to be opened, as `Offload.open` says."""

    length_max: int | None
    salt: bytes
    promise: Promise
    reuse_max: int | None
    on_device: bool
    from_disk: bool
    load_max: int | None


def open_sequence(owner: Owner, tokens: list[int], how: Opening) -> Sequence:
    """The last token is never cached: a step must compute from it what comes next."""
    owner.pools.inflight.settle()
    layout = owner.pools.layout
    known_count = len(tokens) - 1
    if how.reuse_max is not None:
        known_count = min(known_count, how.reuse_max)
    hashes = owner.latest_hashes.of(tokens, known_count, salt=how.salt)
    prefix, claim = (
        _cached_prefix(owner.pools, hashes, from_disk=how.from_disk, needs_state=how.on_device)
        if how.load_max is None
        else _part_prefix(owner.pools, hashes, how.load_max)
    )
    start = Start(
        tokens=tokens,
        length=len(prefix) * PAGE_ROWS,
        text_length=len(prefix) * layout.page_tokens,
        text_hash=[root_hash(how.salt), *hashes][len(prefix)],
        published_count=len(prefix),
    )
    sequence = Sequence(owner, start, salt=how.salt, length_max=how.length_max, promise=how.promise)
    page_count = layout.pages_of(len(tokens))
    if how.on_device and claim is None and how.load_max is None:
        _begin_on_device(owner.pools, sequence, prefix, page_count, hashes)
    else:
        _begin_on_host(sequence, prefix, page_count, claim)
    return sequence


def _begin_on_device(
    pools: Pools, sequence: Sequence, prefix: PageIds, page_count: int, hashes: list[bytes]
) -> None:
    kept = pools.states.kept if pools.states and len(prefix) else None
    content = b"" if kept is None else hashes[len(prefix) - 1]
    sequence.holding.open(
        prefix,
        page_count,
        length=sequence.length,
        text=sequence.text_length,
        state=None if kept is None else kept.of(content),
    )
    if kept is not None:
        kept.begun(content)


def _begin_on_host(
    sequence: Sequence, prefix: PageIds, page_count: int, claim: Claim | None
) -> None:
    """Preempted, and loading if the disk has a part of the prefix."""
    try:
        sequence.holding.open_on_host(prefix, page_count)
        if claim is not None:
            sequence.load(claim)
    except BaseException:
        sequence.discard()
        if claim is not None:
            claim.release()
        raise


def _cached_prefix(
    pools: Pools, hashes: list[bytes], *, from_disk: bool, needs_state: bool
) -> tuple[PageIds, Claim | None]:
    """Pages of the longest cached prefix, and what the disk has behind them.

    With MTP its last page is left out: row p of the module was made with token p + 1, and the last
    row of a prefix saw another continuation. All parts of a model find the same. Where requests
    keep something beside their rows, the prefix ends where that was kept, unless it is to come.
    """
    pages, claim = pools.latent.prefix.find(hashes), None
    count = len(pages)
    if from_disk and pools.shelf is not None:
        claim = pools.shelf.claim(hashes, known_count=count)
        count += len(claim.contents)
    count = _usable(count, pools.layout)
    if pools.states is not None and needs_state:
        count = pools.states.kept.longest(hashes[:count])
    prefix = np.array(pages[:count], np.int32)
    if claim is not None:
        claim.keep(count - len(prefix))
    return prefix, claim if claim is not None and claim.contents else None


def _part_prefix(pools: Pools, hashes: list[bytes], load_max: int) -> tuple[PageIds, Claim | None]:
    """Pages of the longest prefix that is cached on the host, whatever the disk has; and what the
    disk has behind them, at most `load_max` pages."""
    prefix, layout = _host_prefix(pools, hashes), pools.layout
    if pools.shelf is None:
        return prefix, None
    first = len(prefix)
    claim = pools.shelf.claim(hashes[: first + load_max + layout.has_mtp], known_count=first)
    claim.keep(_usable(len(claim.contents), layout))
    return prefix, claim if claim.contents else None


def count_on_disk(owner: Owner, tokens: list[int], *, salt: bytes) -> int:
    """How many pages of the prompt the disk has behind those that the host has."""
    pools = owner.pools
    if pools.shelf is None:
        return 0
    hashes = owner.latest_hashes.of(tokens, len(tokens) - 1, salt=salt)
    behind = hashes[len(_host_prefix(pools, hashes)) :]
    return _usable(pools.shelf.leading_count(behind), pools.layout)


def _host_prefix(pools: Pools, hashes: list[bytes]) -> PageIds:
    pages = pools.latent.prefix.find(hashes)
    return np.array(pages[: _usable(len(pages), pools.layout)], np.int32)


def _usable(count: int, layout: ModelLayout) -> int:
    """How many pages of a prefix serve: with MTP all but the last."""
    return max(0, count - layout.has_mtp)
