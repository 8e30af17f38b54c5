"""Damage a checkpoint N times and load it: a clean error or a correct load, nothing else.

    python tests/unit/weights/damage.py CASES SEED FOLDER

Beside the outcome of each case, three things are proved for the process as a whole: an audit hook
sees every file that is opened (none outside the case's folder, and never by a path from the
index); the address space may not grow by more than 512 MiB over its size after imports; and
tracemalloc bounds what Python allocates in one case.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import shutil
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest
import torch

from ess.errors import BadInput
from ess.models.registry import MODULES
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.rank import RankWeights

GROWTH_BYTES_MAX = 512 << 20
PYTHON_BYTES_MAX = 64 << 20
INDEX = "model.safetensors.index.json"
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
CONFIG = {
    **conftest.SMALL,
    "vocab_size": 8,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "kv_lora_rank": 128,
    "index_n_heads": 1,
    "n_routed_experts": 2,
}
NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 127, 128, 129, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64, 10**40),
    *(1.5, 1e308, True, None, "128", [], {}, [128]),
)
PATHS: tuple[Any, ...] = (
    *(
        "../outside.safetensors",
        "/etc/passwd",
        "a/../../x.safetensors",
        ".",
        "..",
        "",
        "config.json",
    ),
    *("\0", "x" * 400, "link.safetensors", "loop.safetensors", "pipe.safetensors", "sub"),
    *("model.bin", "model.pt", 5, None, [], {}, "~/x.safetensors", "%2e%2e/x.safetensors"),
)
DTYPES: tuple[Any, ...] = ("F32", "BF16", "F16", "U8", "I64", "F8_E8M0", "F4", "", 3, None)
Mutation = Callable[[random.Random, Path], bool]


def flip_bytes(rng: random.Random, path: Path, *, low: int, high: int) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        raw[rng.randrange(low, min(high, len(raw)))] = rng.choice(
            (0, 0x7F, 0xFF, rng.randrange(256))
        )
    path.write_bytes(raw)


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def edit_header(path: Path, change: Callable[[Any], None]) -> None:
    raw = path.read_bytes()
    count = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + count])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + count :])


# Each mutation returns True if a load that still succeeds must give the original values.


def damage_prefix(rng: random.Random, folder: Path) -> bool:
    path = folder / rng.choice(FILES)
    raw = path.read_bytes()
    old = int.from_bytes(raw[:8], "little")
    claim = rng.choice((rng.getrandbits(64), old + rng.randrange(-9, 10), rng.randrange(len(raw))))
    path.write_bytes((claim % 2**64).to_bytes(8, "little") + raw[8:])
    return True


def damage_header_bytes(rng: random.Random, folder: Path) -> bool:
    path = folder / rng.choice(FILES)
    flip_bytes(rng, path, low=8, high=8 + int.from_bytes(path.read_bytes()[:8], "little"))
    return False


def damage_entry(rng: random.Random, folder: Path) -> bool:
    def change(header: Any) -> None:
        names = [name for name in header if name != "__metadata__"]
        name, other = rng.choice(names), rng.choice(names)
        entry, key = header[name], rng.choice(("dtype", "shape", "data_offsets"))
        roll = rng.random()
        if roll < 0.2:
            entry[key] = header[other][key]
        elif roll < 0.3:
            del entry[key]
        elif roll < 0.4:
            header[rng.choice((name + "x", "", other, "a" * 600))] = header.pop(name)
        elif key == "dtype":
            entry[key] = rng.choice(
                ("F32", "BF16", "F16", "U8", "I64", "F8_E8M0", "F4", "", 3, None)
            )
        else:
            entry[key][rng.randrange(len(entry[key]))] = rng.choice(NUMBERS)

    edit_header(folder / rng.choice(FILES), change)
    return False


def damage_length(rng: random.Random, folder: Path) -> bool:
    path = folder / rng.choice((*FILES, INDEX, "config.json"))
    size = path.stat().st_size
    os.truncate(
        path, rng.choice((0, 1, 7, 8, 9, size - 1, size + 1, size + 4096, rng.randrange(size)))
    )
    return True


def damage_scale(rng: random.Random, folder: Path) -> bool:
    path = folder / rng.choice(FILES)
    raw = bytearray(path.read_bytes())
    count = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + count])
    scales = [entry for name, entry in header.items() if name.endswith("_scale_inv")]
    begin = 8 + count + rng.choice(scales)["data_offsets"][0]
    value = rng.choice((torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -1.0))
    raw[begin : begin + 4] = torch.tensor([value]).numpy().tobytes()
    path.write_bytes(raw)
    return True


def damage_values(rng: random.Random, folder: Path) -> bool:
    path = folder / rng.choice(FILES)
    flip_bytes(rng, path, low=8 + int.from_bytes(path.read_bytes()[:8], "little"), high=2**62)
    return False


def damage_index(rng: random.Random, folder: Path) -> bool:
    def change(index: Any) -> None:
        name = rng.choice(list(index["weight_map"]))
        roll = rng.random()
        if roll < 0.5:
            index["weight_map"][name] = rng.choice(PATHS)
        elif roll < 0.6:
            del index["weight_map"][name]
        elif roll < 0.7:
            index["weight_map"][name + "y"] = rng.choice(FILES)
        elif roll < 0.8:
            index["weight_map"] = rng.choice(([], {}, None, 3, "x", [name]))
        else:
            index["weight_map"] = dict.fromkeys(index["weight_map"], rng.choice(PATHS))

    edit_json(folder / INDEX, change)
    return True


def damage_config(rng: random.Random, folder: Path) -> bool:
    def change(config: Any) -> None:
        for _ in range(rng.choice((1, 1, 3))):
            key = rng.choice(list(config))
            if rng.random() < 0.2:
                del config[key]
            elif rng.random() < 0.2:
                config.update({"auto_map": {"AutoConfig": "x.Y"}})
            else:
                config[key] = rng.choice((*NUMBERS, "glm_moe_dsa", {"quant_method": "gptq"}))

    edit_json(folder / "config.json", change)
    return True


def damage_json_bytes(rng: random.Random, folder: Path) -> bool:
    path = folder / rng.choice((INDEX, "config.json"))
    if rng.random() < 0.2:
        path.write_bytes(rng.choice((b"[" * 10**5, b'{"a":' * 10**5, b"\xff\xfe{}", b"9" * 10**5)))
    else:
        flip_bytes(rng, path, low=0, high=2**62)
    return False


def replace_file(rng: random.Random, folder: Path) -> bool:
    path = folder / rng.choice((*FILES, INDEX, "config.json"))
    path.unlink()
    match rng.randrange(4):
        case 0:
            path.symlink_to(
                rng.choice((folder.parent / "outside.safetensors", "/etc/passwd", path))
            )
        case 1:
            os.mkfifo(path)
        case 2:
            path.mkdir()
    return True


MUTATIONS: tuple[Mutation, ...] = (
    damage_prefix,
    damage_header_bytes,
    damage_header_bytes,
    damage_entry,
    damage_entry,
    damage_length,
    damage_scale,
    damage_values,
    damage_index,
    damage_config,
    damage_json_bytes,
    replace_file,
)


# A damaged configuration may name the other family: its module is no stray file.
for module in MODULES.values():
    importlib.import_module(module)


class Watch:
    """An audit hook: every open while `folder` is set is checked, for any caller."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.opened = 0
        self.strayed: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or self.folder is None or isinstance(arguments[0], int):
            return
        self.opened += 1
        name = os.fsdecode(arguments[0])
        plain = "/" not in name and name not in (".", "..")
        if not plain and Path(name) != self.folder:
            self.strayed.append(name)


def prove_that_it_hears(watch: Watch, folder: Path) -> None:
    watch.folder = folder / "case"
    (folder / "outside.safetensors").read_bytes()
    watch.folder = None
    assert watch.strayed == [str(folder / "outside.safetensors")], watch.strayed
    watch.strayed.clear()


def load(folder: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(folder) as checkpoint:
        weights = RankWeights(checkpoint, form="bf16")
        tensors = {name: t for _, layer in weights.stream() for name, t in layer.items()}
        for name, tensor in tensors.items():
            assert tensor.shape == checkpoint.specs[name].shape, name
        return tensors


def build(folder: Path) -> None:
    source = folder / "source"
    conftest.write_checkpoint(source, CONFIG)
    (folder / "outside.safetensors").write_bytes((source / FILES[0]).read_bytes())
    (source / "link.safetensors").symlink_to(folder / "outside.safetensors")
    (source / "loop.safetensors").symlink_to("loop.safetensors")
    (source / "sub").mkdir()
    os.mkfifo(source / "pipe.safetensors")


def lay_out(source: Path, case: Path) -> None:
    shutil.rmtree(case, ignore_errors=True)
    case.mkdir()
    for path in source.iterdir():
        if path.is_fifo():
            os.mkfifo(case / path.name)
        elif path.is_dir():
            (case / path.name).mkdir()
        else:
            shutil.copyfile(path, case / path.name, follow_symlinks=False)


def address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def one_case(mutation: Mutation, seed: int, folder: Path, watch: Watch, want: Any) -> str:
    case = folder / "case"
    lay_out(folder / "source", case)
    same = mutation(random.Random(seed), case)
    watch.folder = case
    try:
        tensors = load(case)
    except BadInput as error:
        return "refused" if 10 < len(str(error)) < 1500 else f"refused badly: {error}"
    finally:
        watch.folder = None
    if same:
        for name, tensor in tensors.items():
            assert torch.equal(tensor.view(torch.uint8), want[name].view(torch.uint8)), name
    return "loaded"


def main() -> None:
    case_count, first_seed, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    build(folder)
    want = {name: tensor.clone() for name, tensor in load(folder / "source").items()}
    limit = address_bytes() + GROWTH_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    watch, outcomes = Watch(), Counter[str]()
    prove_that_it_hears(watch, folder)
    tracemalloc.start(1)
    for number in range(case_count):
        seed = first_seed * 1_000_003 + number
        mutation = MUTATIONS[number % len(MUTATIONS)]
        try:
            outcomes[f"{mutation.__name__} {one_case(mutation, seed, folder, watch, want)}"] += 1
        except BaseException:
            print(f"case {number} seed {seed} {mutation.__name__}")
            raise
    peak = tracemalloc.get_traced_memory()[1]
    print(
        f"{case_count} cases, {watch.opened} opens, peak {peak / 2**20:.1f} MiB of Python objects"
    )
    print(*(f"  {key:30} {count}" for key, count in sorted(outcomes.items())), sep="\n")
    assert not any("badly" in key for key in outcomes), outcomes
    assert not watch.strayed, f"opened outside the folder: {watch.strayed[:5]}"
    assert peak < PYTHON_BYTES_MAX, f"one case allocated {peak:,} bytes"
    assert watch.opened > case_count


if __name__ == "__main__":
    main()
