"""What may come in: as docs/serving.md lists it, and as a server with other settings does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ess.server.commands.start.settings import FIELDS, resolve
from ess.server.process.bound_table import BOUNDS, Bound, in_force

ROOT = Path(__file__).resolve().parents[2]


def row_of(bound: Bound) -> str:
    setting = f"`{bound.setting}`" if bound.setting else ""
    return f"| {bound.what} | {bound.most} | {bound.beyond} | {setting} |"


def test_the_document_has_every_bound():
    rows = [row_of(bound) for bound in BOUNDS]
    head = ["| what | at most | beyond that | setting |", "|---|---|---|---|"]
    table = "\n".join([*head, *rows]) + "\n\n"
    assert table in (ROOT / "docs" / "serving.md").read_text(), f"write into it:\n{table}"


def values_of(flags: dict[str, object]) -> dict[str, object]:
    shown = resolve(flags, environment={}).shown()
    return {name: entry["value"] for name, entry in shown.items()}


def test_a_bound_has_its_settings_value():
    named = {bound.setting for bound in BOUNDS if bound.setting}
    assert named <= {known.flag for known in FIELDS.values()}
    assert in_force(values_of({})) == [asdict(bound) for bound in BOUNDS]
    given = {"max_connections": 1500, "body_bytes": "1MiB", "header_bytes": "16k", "idle_s": 7.5}
    given["unread_bytes"] = "64MiB"
    most = {row["setting"]: row["most"] for row in in_force(values_of({**given, "stall_s": 90}))}
    assert most == {
        "": most[""],
        "--max-connections": "1,500",
        "--body-bytes": "1MiB",
        "--header-bytes": "16k",
        "--unread-bytes": "64MiB",
        "--idle-s": "7.5 s",
        "--stall-s": "90 s",
    }
