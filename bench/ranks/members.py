"""How often a stage's host pool is in memory when the stage is several processes.

A real server with `--tp-size` reads prompts that fill a part of its pool. Then the system says how
much of the pool each process has in memory, and its share of these pages: the sum of the shares is
the cost of the pool. The baseline is a pool for each process.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ess.bench.engine.serve import started
from ess.bench.harness.report import Row, compare
from ess.door.memory.common_host import NAME
from ess.kernels.mappings import Mapping, mappings

TP_SIZE: Final = 2
PROMPTS: Final = 6
TOKENS: Final = 1500
MIB: Final = 1 << 20


def member_rows(*, smoke: bool) -> list[Row]:
    count, tokens = (1, 100) if smoke else (PROMPTS, TOKENS)
    flags = ("--tp-size", str(TP_SIZE), "--host-bytes", "256MiB", "--max-model-len", "2k")
    with started("serve", *flags, "--threads", "1") as (process, url):
        for first in range(count):
            read_prompt(url, [(first + at) % 90 + 5 for at in range(tokens)])
        mappings = [mapped for pid in kin(process.pid) if (mapped := pools(pid))]
    shares = [sum(each.share_bytes for each in mapped) / MIB for mapped in mappings]
    resident = [sum(each.resident_bytes for each in mapped) / MIB for mapped in mappings]
    return [
        compare(
            name=f"host pool of a stage: {len(mappings)} processes",
            unit="MiB",
            ours=[sum(shares)],
            baseline=("one for each process", [max(resident) * len(mappings)]),
            config={
                "tp_size": TP_SIZE,
                "share_mib": [round(mib, 1) for mib in shares],
                "resident_mib": [round(mib, 1) for mib in resident],
                "files": len({each.inode for mapped in mappings for each in mapped}),
                "writers": sum(any("w" in each.access for each in mapped) for mapped in mappings),
            },
        )
    ]


def read_prompt(url: str, prompt: list[int]) -> None:
    asked = {"model": "ess-embedded", "prompt": prompt, "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=300).close()


def pools(pid: int) -> list[Mapping]:
    return [each for each in mappings(pid) if each.file.startswith(f"/memfd:ess-{NAME}")]


def kin(pid: int) -> Iterator[int]:
    """The process and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from kin(int(child))
