"""Console scripts: documents on stdout, sentences on stderr, exit codes 0, 1 and 2."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import threading

import pytest

from ess import console
from ess.errors import BadInput, PoolFull, Unavailable
from ess.server.commands import cli

HERE = __name__


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["layotu"], 2, 'Did you mean "layout"'),
        (["layout", "glm-5", "--jsn"], 2, "unknown option --jsn; did you mean --json?"),
        (["serve", "--prot", "80"], 2, "unknown option --prot; did you mean --port?"),
        (["serve", "--colour"], 2, "unknown option --colour"),
        (["layout"], 2, "NAME"),
        (["layout", "glm-5", "--row", "fp4"], 2, "fp8"),
        (["layout", "glm-6"], 2, "choose from deepseek-v3.2, glm-5, glm-5.2, ess-embedded"),
        (["layout", "glm-5", "--host-bytes", "7q"], 2, "'7q' is not a size"),
    ],
)
def test_a_wrong_command_line_is_explained(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == code
    streams = capsys.readouterr()
    assert says in " ".join(streams.err.replace("│", " ").split())
    assert streams.out == ""


def test_the_value_of_a_misspelt_option_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--api-kye=top-secret"]) == 2
    shown = capsys.readouterr().err
    assert "did you mean --api-key?" in shown
    assert "top-secret" not in shown


def test_help_breaks_no_line_where_there_is_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ess prefill` has the flags of `ess serve` and `ess decode`, and more."""
    monkeypatch.setenv("COLUMNS", "400")
    for name in {command.name for command in cli.COMMANDS} - {"serve", "decode"}:
        assert cli.main([name, "--help"]) == 0
        broken = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│    ")]
        assert not broken, f"{name}: {broken}"


def test_a_layout_says_what_a_token_costs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["layout", "deepseek-v3.2", "--host-bytes", "24GiB"]
    assert cli.main([*arguments, "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert cost["token_host_bytes"] == 62 * (656 + 132)
    assert cost["wire_page_bytes"] == 64 * 656
    assert cost["slot_floor_bytes"] == 6400 * 62 * 656
    assert cost["host_token_count"] == 24 * 2**30 // (64 * 62 * (656 + 132)) * 64
    assert cli.main(arguments) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert f"capacity {cost['host_token_count']:,} tokens in 24.00 GiB" in table


def test_shared_groups_store_fewer_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["layout", "glm-5.2", "--row", "bf16", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert (cost["row_bytes"], cost["group_count"]) == (1152, 22)
    assert cost["token_host_bytes"] == 79 * 1152 + 22 * 132
    assert cost["host_token_count"] is None


def test_the_version_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)
    assert list(versions) == ["ess", "python", "numpy", "torch", "native"]
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == versions["ess"]
    assert cli.main(["version"]) == 0
    assert versions["numpy"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("length is -1"), 2),
        (Unavailable("no CUDA here"), 1),
        (PoolFull(limiter="slots", needed=2, free=1, sentence="needs 2 slots, 1 free"), 1),
        (FileNotFoundError(2, "No such file", "x.trace"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_sentences_and_codes(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    app = console.make_app("tool", summary="", version="1", commands=())

    @app.command
    def fail() -> None:
        raise error

    assert console.run(app, ["fail"]) == code
    streams = capsys.readouterr()
    assert streams.err.startswith("tool: ")
    assert streams.err.count("\n") == 1
    assert "Errno" not in streams.err
    assert streams.out == ""


@pytest.mark.parametrize("script", ["ess", "ess_bench"])
def test_ctrl_c_while_a_command_is_imported_is_a_sentence(script: str) -> None:
    """The signal comes from what is imported first: at that moment nothing of ours can catch it but
    the script itself."""
    code = (
        "import sys\n"
        "class Ends:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'cyclopts': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Ends())\n"
        "from ess import scripts\n"
        f"sys.exit(scripts.{script}())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, f"{script.replace('_', '-')}: interrupted\n")


def test_our_own_faults_keep_their_traceback() -> None:
    app = console.make_app("tool", summary="", version="1", commands=())

    @app.command
    def fail() -> None:
        raise AssertionError("ESS itself is wrong")

    with pytest.raises(AssertionError, match="ESS itself"):
        console.run(app, ["fail"])


def test_a_closed_pipe_is_no_traceback() -> None:
    code = (
        "from ess.server.commands.cli import main\n"
        "raise SystemExit(main(['layout', 'glm-5', '--json']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        complaint = process.stderr.read()
    assert (process.returncode, complaint) == (1, b"")


def test_a_closed_stdout_is_no_traceback() -> None:
    ess = f"{sys.executable} -c 'from ess.scripts import ess; raise SystemExit(ess())'"
    done = subprocess.run(f"{ess} layout glm-5 >&-", shell=True, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_streams_that_are_closed_are_open_in_the_processes_of_a_command_too() -> None:
    child = "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"
    command = (
        "import subprocess, sys; from ess import scripts; scripts._open_what_is_closed();"
        f"sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    )
    closed = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(command)} <&- >&- 2>&-"
    assert subprocess.run(closed, shell=True).returncode == 0


def test_a_shell_completes_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    asks = [
        f"COMP_WORDS=({words}) COMP_CWORD={at}; _ess; echo ${{COMPREPLY[*]}}"
        for words, at in (("ess pl", 1), ("ess serve --max-run", 2), ("ess plan --stack ''", 3))
    ]
    script = "\n".join([capsys.readouterr().out, *asks])
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    plan, most, stacks = done.stdout.splitlines()
    assert (plan, stacks) == ("plan", "sglang vllm trtllm")
    assert "--max-running" in most.split()


class Screen(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.has_seconds = threading.Event()

    def write(self, text: str) -> int:
        if text.endswith(" s"):
            self.has_seconds.set()
        return super().write(text)


def test_a_terminal_shows_the_seconds_of_a_long_block_and_a_pipe_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    monkeypatch.setattr(os, "isatty", lambda file: False)
    with console.seconds_shown(every_s=0):
        console.note("begun")
    assert screen.getvalue() == "begun\n"
    monkeypatch.setattr(os, "isatty", lambda file: file == 2)
    with console.seconds_shown(every_s=0):
        assert screen.has_seconds.wait(60)
    assert screen.getvalue().startswith("begun\n   0 s\r")
    assert screen.getvalue().endswith("\r      \r")


def test_tables_in_a_pipe_are_neither_wrapped_nor_coloured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(["layout", "deepseek-v3.2"]) == 0
    table = capsys.readouterr().out
    assert "\x1b" not in table
    lines = table.splitlines()
    assert any("index keys and the row map" in line for line in lines)
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("name", "token", "floor", "keyed"),
    [
        ("dots3-note", 13 * (656 + 132) + 33 * 1184, 13 * 656 * 6400 + 33 * 1184 * 576, 13),
        ("mistral-large-4", 54 * 656 + 18 * 528 + 72 * 132, (54 * 656 + 18 * 528) * 6400, 72),
        ("hy4-preview", 34 * 656 + 10 * 132, 34 * 656 * 6400, 10),
        ("a.x-k2-light", 48 * (196 + 132), 48 * 196 * 6400, 48),
    ],
)
def test_published_configurations_have_a_layout(
    name: str, token: int, floor: int, keyed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["layout", name, "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert cost["layout"] == name
    said = cost["token_host_bytes"], cost["slot_floor_bytes"], cost["key_group_count"]
    assert said == (token, floor, keyed)
    assert cli.main(["layout", name]) == 0
    assert " or ".join(f"{size:,} B" for size in cost["row_sizes"][::-1]) in capsys.readouterr().out
