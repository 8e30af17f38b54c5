"""Mechanical mutants of the deciders: does a test die when one comparison or line is wrong?

    python -m tests.model.mutants [--module ess.pool.lru.specification] [--sample 40] [--seed 0]
    [--floor 0.9]

Each mutant changes one thing in one module: a comparison, an arithmetic sign, a constant, a
condition, or it drops a statement, in functions with `async` too. A forked child gives the mutated
function its code and runs the module's tests until the first failure. Asserts, audits (`check`,
also where they are called) and error texts are not mutated: they watch, they do not decide. A
mutant that runs into the time limit counts as killed. Survivors are printed with the changed line:
each is a missing test or an equivalent.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import gc
import importlib
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
NOT_PUT_IN = 3
PROFILE = hypothesis.settings(phases=[hypothesis.Phase.generate], database=None, deadline=None)
"""The first failure is enough: no smaller one is sought."""
OFFLOAD = "tests/model/test_offload.py"
SEEDS = "tests/campaign/few_seeds.py"
RECEIVER = ("tests/handoff/test_receiver.py", "tests/handoff/test_receiver_endings.py")
MEETING = ("tests/handoff/test_meeting.py", "tests/handoff/test_port.py")
LEAD = ("tests/prefill/test_lead.py", "tests/prefill/test_tier.py")
DISKS_OF_STAGES = "tests/prefill/test_stage_disks.py"
NEW_ROWS = "tests/unit/door/test_new_rows.py"
DOOR = ("tests/unit/door/test_at_once.py", "tests/unit/door/test_door.py", NEW_ROWS)
SUITES = {
    "ess.kernels.merge": ["tests/kernels/test_merge.py", "tests/kernels/test_merge_drawn.py"],
    "ess.pool.lru.specification": [
        "tests/unit/pool/test_lru.py",
        "tests/kernels/test_planner_drawn.py",
        "tests/kernels/test_planner.py",
        "tests/kernels/test_lookup.py",
    ],
    "ess.pool.lru.planner": [
        "tests/kernels/test_planner.py",
        "tests/kernels/test_lookup.py",
        "tests/kernels/test_planner_drawn.py",
    ],
    "ess.pool.pages": ["tests/unit/pool/test_pages.py"],
    "ess.pool.prefix": ["tests/unit/pool/test_prefix.py", "tests/unit/pool/test_latent.py"],
    "ess.pool.latent": ["tests/unit/pool/test_latent.py", "tests/unit/door/test_door.py", OFFLOAD],
    "ess.pool.index": ["tests/unit/pool/test_index.py", "tests/unit/door/test_door.py", OFFLOAD],
    "ess.pool.sparse": ["tests/unit/pool/test_sparse.py", "tests/unit/door/test_door.py", OFFLOAD],
    "ess.pool.slot_counts": ["tests/unit/pool/test_slot_counts.py"],
    "ess.pool.warmup": ["tests/unit/pool/test_warmup.py", "tests/unit/door/test_door.py"],
    "ess.pool.ledger": ["tests/unit/pool/test_ledger.py"],
    "ess.pool.budget": ["tests/unit/pool/test_budgets.py", "tests/model/test_budgets_live.py"],
    "ess.overlap.none": ["tests/unit/test_schedules.py"],
    "ess.overlap.da": ["tests/unit/test_schedules.py"],
    "ess.overlap.dba": ["tests/unit/test_schedules.py"],
    "ess.overlap.resident": ["tests/unit/test_schedules.py"],
    "ess.overlap.tbo": ["tests/unit/test_tbo.py"],
    "ess.overlap.sbo": ["tests/unit/test_tbo.py"],
    "ess.overlap.policy": ["tests/unit/test_policy.py"],
    "ess.door.residency.row_copies": [*DOOR, OFFLOAD],
    "ess.door.residency.slots": [*DOOR, "tests/unit/door/test_door_misuse.py", OFFLOAD],
    "ess.door.memory.inflight": ["tests/unit/door/test_door_audits.py", *DOOR],
    "ess.door.sequences.progress": [*DOOR, "tests/unit/door/test_door_misuse.py", OFFLOAD],
    "ess.door.steps.step": [
        *DOOR,
        "tests/unit/door/test_door_misuse.py",
        OFFLOAD,
    ],
    "ess.door.residency.refill": ["tests/unit/door/test_refill.py", "tests/unit/door/test_door.py"],
    "ess.door.residency.budgets": [
        "tests/unit/pool/test_budgets.py",
        "tests/model/test_budgets_live.py",
    ],
    "ess.cost": ["tests/unit/test_cost.py", "tests/unit/test_policy.py"],
    "ess.comm.experts.balance": ["tests/comm/test_balance.py"],
    "ess.sim.locality.stack_distances": ["tests/unit/test_policies.py"],
    "ess.engine.step.drafts": [
        "tests/model/test_mtp.py",
        "tests/model/test_engine.py",
        "tests/model/test_depth.py",
        "tests/model/test_verify.py",
    ],
    "ess.engine.tpot_control": ["tests/unit/test_pace.py"],
    "ess.engine.step.decode": ["tests/model/test_engine.py", "tests/model/test_depth.py"],
    "ess.engine.step.underway.future": ["tests/model/test_depth.py"],
    "ess.engine.requests.admission": [
        "tests/model/test_priority.py",
        "tests/model/test_pressure.py",
        SEEDS,
    ],
    "ess.engine.requests.entry": ["tests/model/test_wishes.py", "tests/model/test_said.py"],
    "ess.engine.requests.intake": [
        "tests/model/test_engine.py",
        "tests/model/test_choices.py",
        "tests/model/test_priority.py",
    ],
    "ess.engine.requests.transitions": [
        "tests/model/test_engine.py",
        "tests/model/test_choices.py",
        "tests/pd/test_engine_handoff.py",
        "tests/pd/test_handoff_ends.py",
        "tests/model/test_priority.py",
        "tests/compressed/test_handed_over.py",
        "tests/disk/test_engine_disk.py",
        SEEDS,
        "tests/model/test_wishes.py",
    ],
    "ess.engine.process.holding": ["tests/server/operate/test_held_steps.py"],
    "ess.engine.tokens.sampling": ["tests/unit/tokens/test_sampling.py"],
    "ess.door.checks": ["tests/unit/door/test_door_misuse.py", *DOOR],
    "ess.models.weights.ahead": ["tests/unit/weights/test_ahead.py", "tests/device/libraries.py"],
    "ess.server.process.link": [
        "tests/server/test_link.py",
        "tests/server/test_recover.py",
        "tests/server/operate/test_slow_readers.py",
    ],
    "ess.server.http.routes.pause_routes": ["tests/server/operate/test_pause.py"],
    "ess.engine.layers.direct": ["tests/model/test_direct.py"],
    "ess.engine.requests.followers": ["tests/model/test_choices.py", SEEDS],
    "ess.engine.handoff": ["tests/pd/test_engine_handoff.py", SEEDS],
    "ess.engine.requests.loads": [
        "tests/disk/test_engine_disk.py",
        "tests/disk/test_shelved.py",
        SEEDS,
    ],
    "ess.engine.scheduler": ["tests/unit/test_scheduler.py", "tests/model/test_engine.py", SEEDS],
    "ess.pool.disk.records": ["tests/disk/test_tier.py", SEEDS],
    "ess.pool.disk.slab": ["tests/disk/test_tier.py", SEEDS],
    "ess.pool.disk.writer": ["tests/disk/test_tier.py", "tests/disk/test_full.py", SEEDS],
    "ess.transfer.arrivals": ["tests/transfer/test_arrivals.py", *RECEIVER, SEEDS],
    "ess.transfer.members": ["tests/transfer/test_members.py", SEEDS],
    "ess.transfer.messages": ["tests/transfer/test_messages.py", SEEDS],
    "ess.transfer.windows": ["tests/transfer/test_windows.py", SEEDS],
    "ess.door.handoff.geometry": [*MEETING, "tests/handoff/test_states.py"],
    "ess.door.handoff.incoming.leg": [*MEETING, *RECEIVER],
    "ess.door.handoff.incoming.receiver": [*RECEIVER, SEEDS],
    "ess.door.handoff.port": [*MEETING, SEEDS],
    "ess.prefill.batches": [*LEAD, SEEDS],
    "ess.prefill.issuer": [*LEAD, SEEDS],
    "ess.prefill.lead": [*LEAD, SEEDS],
    "ess.prefill.openings": [*LEAD, DISKS_OF_STAGES, SEEDS],
    "ess.prefill.orders": ["tests/prefill/test_orders.py", SEEDS],
    "ess.prefill.prompts": [*LEAD, SEEDS],
    "ess.prefill.records": ["tests/prefill/test_orders.py", SEEDS],
    "ess.prefill.reports": ["tests/prefill/test_orders.py", SEEDS],
    "ess.prefill.stage": [*LEAD, "tests/prefill/test_refused_open.py", DISKS_OF_STAGES, SEEDS],
    "ess.prefill.stages": [*LEAD, SEEDS],
}
FLIPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.USub: ast.UAdd,
}
DROPPED = (ast.Assign, ast.AugAssign, ast.Delete, ast.Expr)
Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.For, ast.AsyncFor, ast.While),
    *(ast.With, ast.AsyncWith, ast.Try, ast.ExceptHandler, ast.match_case),
)


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    change: str
    code: CodeType


def mutants_of(module: str) -> Iterator[Mutant]:
    text = source_of(module)
    lines = text.splitlines()
    count = len(list(sites(ast.parse(text))))
    for number in range(count):
        tree = ast.parse(text)
        node, field, index = list(sites(tree))[number]
        line = (node.pattern if isinstance(node, ast.match_case) else node).lineno
        change = apply(node, field, index)
        mutated = compiled(module, ast.fix_missing_locations(tree))
        yield Mutant(module, line, f"{change}: {lines[line - 1].strip()}", mutated)


def source_of(module: str) -> str:
    return (ROOT / (module.replace(".", "/") + ".py")).read_text()


def sites(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int]]:
    """Every place that can be changed, as (node, field, index in the field)."""
    for node in deciding(tree):
        if isinstance(node, ast.Compare):
            yield from ((node, "ops", i) for i, op in enumerate(node.ops) if type(op) in FLIPS)
        elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp, ast.UnaryOp)):
            if type(node.op) in FLIPS:
                yield node, "op", 0
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, "value", 0
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield node, "test", 0
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and isinstance(node, BLOCKS):
                yield from (
                    (node, name, i)
                    for i, statement in enumerate(block)
                    if isinstance(statement, DROPPED) and not is_silent(statement)
                )


def deciding(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of function bodies, without asserts, audits, errors, texts and annotations."""
    for function in functions(tree):
        if not function.name.lstrip("_").startswith(("check", "assert", "refus")):
            yield function
            for statement in function.body:
                yield from walk(statement)


def functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    if is_silent(node):
        return
    yield node
    for name, child in ast.iter_fields(node):
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, ast.AST) and name not in ("annotation", "returns"):
                yield from walk(each)


def is_silent(node: ast.AST) -> bool:
    """What watches, and what is only read by people."""
    match node:
        case ast.Assert() | ast.Raise() | ast.JoinedStr():
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if name.startswith("_assert_"):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="check"), args=[])):
            return True
    return False


def apply(node: ast.AST, field: str, index: int) -> str:
    """Changes the tree in place and says what was done."""
    value = getattr(node, field)
    if field == "ops":
        old = type(value[index])
        value[index] = FLIPS[old]()
        return f"{old.__name__} -> {FLIPS[old].__name__}"
    if field == "op":
        setattr(node, field, FLIPS[type(value)]())
        return f"{type(value).__name__} -> {FLIPS[type(value)].__name__}"
    if field == "value":
        setattr(node, field, value + 1)
        return f"{value} -> {value + 1}"
    if field == "test":
        setattr(node, field, ast.UnaryOp(ast.Not(), copy.deepcopy(value)))
        return "condition negated"
    dropped = ast.unparse(value[index])
    never = ast.If(test=ast.Constant(False), body=[value[index]], orelse=[])
    value[index] = ast.copy_location(never, value[index])
    return f"dropped `{dropped[:60]}` in"


class Campaign:
    """A plugin of pytest: instead of the tests once, each module's tests for each of its mutants.

    What tests import, and the tests themselves, are there before the first mutant is: a child is
    forked from them, and starts with the next line.
    """

    def __init__(self, *, sample: int | None, seed: int, limit_s: int) -> None:
        self._sample, self._seed, self._limit_s = sample, seed, limit_s
        self.shares: dict[str, float] = {}

    def run(self, modules: list[str]) -> None:
        names = dict.fromkeys(name for module in modules for name in SUITES[module])
        options = ["-x", "-q", "-s", "-p", "no:cacheprovider", "-m", "not slow"]
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        hypothesis.settings.register_profile("mutants", PROFILE)
        hypothesis.settings.load_profile("mutants")
        self._modules = modules
        status = pytest.main([*options, *(str(ROOT / name) for name in names)], plugins=[self])
        assert status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), status
        assert list(self.shares) == modules, f"of {modules} only {list(self.shares)} were tried"

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for module in self._modules:
            ranks = {ROOT / name: rank for rank, name in enumerate(SUITES[module])}
            items = [item for item in session.items if item.path in ranks]
            items.sort(key=lambda item: ranks[item.path])
            self.shares[module] = self._share(module, items)
        return True

    def _share(self, module: str, items: list[pytest.Item]) -> float:
        live = Live.of(module)
        assert live.functions, f"{module} has no function that could be another"
        sound = Mutant(module, 0, "none", compiled(module, ast.parse(source_of(module))))
        assert survives(sound, live, items, LIMIT_S), (
            f"the tests of {module} fail on the unchanged module"
        )
        tried = list(mutants_of(module))
        if self._sample is not None:
            tried = random.Random(self._seed).sample(tried, min(self._sample, len(tried)))
        killed_count = 0
        for mutant in tried:
            if survives(mutant, live, items, self._limit_s):
                print(f"  survived {module}:{mutant.line} {mutant.change}", flush=True)
            else:
                killed_count += 1
        share = killed_count / len(tried)
        print(f"{module}: {killed_count} of {len(tried)} killed, {share:.1%}", flush=True)
        return share


@dataclass(frozen=True)
class Live:
    """The functions of a module wherever they are held, and what any of ours has remembered."""

    functions: list[FunctionType]
    remembering: list[functools._lru_cache_wrapper[Any]]

    @classmethod
    def of(cls, module: str) -> Live:
        importlib.import_module(module)  # tests may do so later
        gc.unfreeze()
        held, path = gc.get_objects(), importlib.util.find_spec(module).origin
        plain = [each for each in held if type(each) is FunctionType]
        wrapped = [each for each in held if type(each) is functools._lru_cache_wrapper]
        return cls(
            [each for each in plain if each.__code__.co_filename == path],
            [each for each in wrapped if each.__module__.startswith("ess.")],
        )

    def become(self, code: CodeType) -> None:
        """Functions keep their names and places everywhere, and do something else."""
        codes = {each.co_qualname: each for each in inner(code)}
        for function in self.functions:
            function.__code__ = codes.get(function.__code__.co_qualname, function.__code__)
        for function in self.remembering:
            function.cache_clear()


def survives(mutant: Mutant, live: Live, items: list[pytest.Item], limit_s: int) -> bool:
    """Whether a forked child, in which the function is another, runs all tests to their end."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = NOT_PUT_IN
        try:
            signal.alarm(limit_s)
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            live.become(mutant.code)
            status = 1
            status = int(any_fails(items))
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code != NOT_PUT_IN, f"{mutant.module}:{mutant.line} {mutant.change} was not put in"
    return code == 0


def any_fails(items: list[pytest.Item]) -> bool:
    session = items[0].session
    for item, follower in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=follower)
        if session.testsfailed:
            return True
    return False


def inner(code: CodeType) -> Iterator[CodeType]:
    """The code of every function of a module, and of the methods of its classes."""
    for held in code.co_consts:
        if isinstance(held, CodeType):
            yield held
            yield from inner(held)


def compiled(module: str, tree: ast.Module) -> CodeType:
    return compile(tree, importlib.util.find_spec(module).origin, "exec", dont_inherit=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--module", action="append", choices=sorted(SUITES))
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--floor", type=float, default=0.0, help="least share killed, else exit 1")
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="seconds of a mutant's tests")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # a child has none of the threads of its parent
    campaign = Campaign(sample=asked.sample, seed=asked.seed, limit_s=asked.limit)
    campaign.run(asked.module or sorted(SUITES))
    raise SystemExit(min(campaign.shares.values()) < asked.floor)


if __name__ == "__main__":
    main()
