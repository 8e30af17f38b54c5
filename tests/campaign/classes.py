"""The faults that a serving system meets, and where each is struck: in seeds, in tests, or nowhere.

`python -m tests.campaign.classes` prints the table that docs/reliability.md has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class FaultClass:
    """`seeds` are strikes, odds or sorts of requests of the campaign. `tests` are files or single
    tests below tests/."""

    name: str
    seeds: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    note: str = ""

    def row(self, number: int) -> str:
        seeds, tests = (", ".join(f"`{each}`" for each in of) for of in (self.seeds, self.tests))
        return f"| {number} | {self.name} | {seeds} | {tests} | {self.note} |"


CLASSES: Final = (
    FaultClass(
        "A prefill worker dies in the middle of a transfer",
        ("restart giver",),
        ("pd/test_two_processes.py::test_a_prefill_worker_that_is_killed",),
    ),
    FaultClass(
        "Only a part of the rows comes",
        ("drop", "partial", "duplicate", "reorder"),
        ("transfer/test_arrivals.py::test_without_any_one_piece_nothing_is_complete",),
    ),
    FaultClass(
        "A reference to rows is stale, or another prompt's",
        ("foreign", "foreign salt"),
        ("transfer/test_stale.py",),
    ),
    FaultClass(
        "The sender's lease ends while the receiver waits",
        ("never taken", "leap", "freeze taker"),
        ("pd/test_handoff_ends.py::test_a_lease_ends_what_nobody_fetches",),
    ),
    FaultClass(
        "A decode worker, or the engine of a server, dies",
        ("restart taker",),
        ("server/test_succession.py::test_a_killed_engine_ends_its_streams_and_another_answers",),
    ),
    FaultClass(
        "A request is aborted, and its pages are not freed",
        (
            *("cancel give", "cancel take", "cancel waiting", "cancel landing"),
            *("cancel loading", "cancel prefilling", "cancel decoding", "cancel preempted"),
        ),
        ("pd/test_handoff_ends.py::test_a_request_that_takes_may_be_cancelled_at_any_time",),
    ),
    FaultClass(
        "A control message is lost, or a worker stands still",
        ("cut", "freeze giver", "delay", "never given"),
        ("transfer/test_peers.py", "pd/stops/test_stops.py"),
    ),
    FaultClass(
        "Another worker answers at a known address",
        ("restart giver", "restart taker"),
        ("transfer/test_strangers.py::test_nobody_answers_in_place_of_another",),
    ),
    FaultClass(
        "Two handoffs have one number",
        ("twice",),
        ("pd/test_handoff_ends.py::test_one_number_is_given_once",),
    ),
    FaultClass(
        "Handoffs that are never fetched",
        ("never taken", "never given"),
        ("transfer/test_strangers.py::test_silent_strangers_are_bounded_and_forgotten",),
    ),
    FaultClass(
        "Junk instead of a worker's frames",
        ("junk", "garble"),
        ("transfer/test_strangers.py", "fuzz/readers.py"),
    ),
    FaultClass(
        "The host's pages run out",
        ("preempt",),
        ("model/test_pressure.py",),
        "pools of 5 to 8 pages in a half of the seeds",
    ),
    FaultClass(
        "Pinned memory is refused, or unpinned late",
        tests=("kernels/test_cuda_lane.py",),
        note="refused by a pretended device; how long a real one takes to unpin is not known",
    ),
    FaultClass(
        "A step selects more rows than there are slots",
        (),
        ("model/test_offload.py",),
        "two pages of slots in a third of the seeds, four tokens a step in another",
    ),
    FaultClass(
        "A slot or page is freed twice, or has two owners",
        ("verify", "forget"),
        ("model/test_offload.py",),
        "every pool is audited after every step",
    ),
    FaultClass(
        "Rows of rejected drafts are read",
        (),
        ("model/test_mtp.py::test_greedy_with_good_and_bad_drafts",),
        "2 or 4 tokens a step in two thirds of the seeds",
    ),
    FaultClass(
        "A client leaves",
        ("cancel take",),
        ("server/test_load.py::test_all_who_leave_free_everything",),
    ),
    FaultClass(
        "A client reads slowly, or not at all",
        (),
        (
            "server/test_attacks_http.py::test_who_reads_nothing_of_many_answers_is_cut_off",
            "server/operate/test_slow_readers.py",
        ),
    ),
    FaultClass(
        "Logits that are no numbers",
        (),
        ("model/test_broken.py", "device/broken.py", "server/test_broken_answers.py"),
    ),
    FaultClass(
        "Bytes change on the way, on the disk or in memory",
        ("corrupt", "rotten read", "torn write", "stray write", "lost write", "slab noise"),
        ("transfer/test_arrivals.py::test_every_flip_of_a_bit_is_found", "disk/test_tier.py"),
        "host memory itself is checked only where `--verify-every` asks for it",
    ),
    FaultClass(
        "A prompt or an option beyond every limit",
        ("too long",),
        ("server/test_limits.py", "fuzz/bodies.py"),
    ),
    FaultClass(
        "Headers and bodies without end, connections that say nothing",
        (),
        ("server/test_attacks_http.py", "attacks/test_attacks.py", "fuzz/http_bytes.py"),
    ),
    FaultClass(
        "A damaged or hostile checkpoint",
        (),
        ("unit/weights/test_hostile.py::test_10_000_damaged_checkpoints", "fuzz/readers.py"),
    ),
    FaultClass(
        "A dead engine is shown as healthy",
        (),
        (
            "server/test_life.py::test_a_killed_engine_fails_health_ends_streams_and_the_server",
            "server/test_life.py::test_a_stuck_engine_is_noticed",
        ),
    ),
    FaultClass(
        "Contexts shorter than the selection, and its padding",
        (),
        ("kernels/test_planner_drawn.py", "model/test_exactness.py"),
        "prompts of 1 to 200 tokens over a selection of 24",
    ),
)


def table() -> str:
    head = "| | fault | in seeds as | in tests | |\n|---|---|---|---|---|\n"
    return head + "\n".join(each.row(number) for number, each in enumerate(CLASSES, 1))


if __name__ == "__main__":
    print(table())
