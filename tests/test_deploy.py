"""docs/deploy cannot rot: its files are parsed, and each command line of `ess` in them goes through
the parser of `ess` and the check of its settings."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ess.errors import BadInput
from ess.server.commands import cli
from ess.server.commands.start import begin
from ess.server.commands.start.settings import Settings, resolve
from ess.server.http.origins import check_page
from ess.server.http.responses import Foreign
from ess.server.http.routes import status_routes
from tests.house.tree import ROOT
from tests.support.own_python import python

DEPLOY = ROOT / "docs" / "deploy"
COMMAND = re.compile(r"\bess ((?:serve|prefill|decode) .*?)(?=[;&`]|\n|$)")
DOCUMENTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))

# What stands for values that only the machine knows.
STANDS_FOR = {
    "ADDRESS": "10.0.0.11",
    "POD_IP": "10.0.0.11",
    "POD_NAME": "ess-decode-0-3",
    "SLURMD_NODENAME": "node2",
    "SLURM_PROCID": "3",
    "LWS_WORKER_INDEX": "3",
    "LWS_LEADER_ADDRESS": "ess-decode-0.ess-decode",
    "model": "/models/deepseek-v3.2",
    "prefill": "node1",
    "head": "node2",
    "secret": "/etc/ess/peer.secret",
    "CREDENTIALS_DIRECTORY": "/etc/ess",
}
ELSEWHERE = {"Containerfile", "grafana.json", "alerts.yaml"}
"""Files with checks of their own: below, and in tests/server/operate/test_boards.py."""

VARIABLE = re.compile(r"\$\((\w+)\)|\$\{(\w+)\}|\$(\w+)")


def lines_of(path: Path) -> list[list[str]]:
    """The words behind `ess`, of each command line in the file."""
    if path.suffix == ".yaml":
        return [words[1:] for words in containers().values() if words[0] == "ess"]
    text = re.sub(r"\\\n\s*", "", path.read_text())
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"^\$ (ess .*)", text, re.MULTILINE))
    return [shlex.split(match[1].replace("%i", "3")) for match in COMMAND.finditer(text)]


def containers() -> dict[str, list[str]]:
    """The words that each container runs, by the name of what has it."""
    return {
        document["metadata"]["name"]: [*container["command"], *container.get("args", ())]
        for document in DOCUMENTS
        for container in spec_of(document).get("containers", ())
    }


def spec_of(document: dict[str, Any]) -> dict[str, Any]:
    """Of its pods; empty if it has none."""
    spec = document["spec"]
    template = spec.get("leaderWorkerTemplate", {}).get("workerTemplate") or spec.get("template")
    return template["spec"] if template else {}


def read(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What `ess` makes of a command line, up to where it would look for the model."""
    secret = folder / "peer.secret"
    secret.write_text("sixteen bytes are enough")
    told: list[Settings] = []

    def taken(flags: dict[str, Any], **_: object) -> int:
        told.append(resolve(flags, environment={}).settings)
        return 0

    monkeypatch.setattr(begin, "serve_flags", taken)
    given = [
        VARIABLE.sub(lambda match: STANDS_FOR[next(filter(None, match.groups()))], w) for w in words
    ]
    given = [word.replace("/etc/ess/peer.secret", str(secret)) for word in given]
    assert cli.main(given) == 0, shlex.join(given)
    return told[0]


LINES = [
    pytest.param(path.name, words, id=f"{path.name}-{number}")
    for path in sorted(DEPLOY.iterdir())
    if path.name not in ELSEWHERE
    for number, words in enumerate(lines_of(path))
]


@pytest.mark.parametrize(("name", "words"), LINES)
def test_ess_takes_every_command_line(name, words, tmp_path, monkeypatch):
    settings = read(words, tmp_path, monkeypatch)
    if settings.role == "decode":
        assert settings.dp_size == 4
        assert (256 + settings.redundant_experts) % 4 == 0, "DeepSeek-V3.2 has 256 experts a layer"
        assert settings.dist_init_addr.endswith(":29600")
        assert [peer.at.port for peer in settings.peer_list] == [8000]
    assert settings.peer_secret == "sixteen bytes are enough"
    assert settings.without_key
    if name != "README.md":
        assert settings.port == 8000


def test_every_file_has_a_command_line_and_the_page_names_it():
    seen = {param.values[0] for param in LINES} | ELSEWHERE
    page = (DEPLOY / "README.md").read_text()
    for path in DEPLOY.iterdir():
        assert path.name in seen, path
        assert path.name == "README.md" or f"]({path.name})" in page


def test_a_container_asks_for_a_key_and_serves_with_one(tmp_path, monkeypatch):
    text = (DEPLOY / "Containerfile").read_text()
    steps = dict(re.findall(r"^(ENTRYPOINT|CMD) (.*)", text, re.MULTILINE))
    assert json.loads(steps["ENTRYPOINT"]) == ["ess"]
    words, keys = json.loads(steps["CMD"]), tmp_path / "keys"
    keys.write_text("secret")
    with pytest.raises(BadInput, match="there is no key: give --api-key-file FILE"):
        resolve({"host": words[words.index("--host") + 1]}, environment={})
    settings = read([*words, "--api-key-file", str(keys)], tmp_path, monkeypatch)
    [probe] = re.findall(r"127.0.0.1:(\d+)(/\w+)", text)
    assert probe == (str(settings.port), "/ready")
    [exposed] = re.findall(r"^EXPOSE (\d+)", text, re.MULTILINE)
    assert int(exposed) == settings.port
    [torch] = re.findall(r" (torch==\S+)", text)
    assert torch in (ROOT / "Makefile").read_text()


def test_the_parser_would_refuse_what_is_wrong(tmp_path, monkeypatch):
    words = lines_of(DEPLOY / "kubernetes.yaml")[1]
    with pytest.raises(AssertionError):
        read([*words, "--redundent-experts=1"], tmp_path, monkeypatch)
    with pytest.raises(KeyError):
        read([*words, "--threads=$(NOBODY_SAYS)"], tmp_path, monkeypatch)


def test_manifests_agree_with_their_command_lines(tmp_path, monkeypatch):
    named = {document["metadata"]["name"]: document for document in DOCUMENTS}
    group = named["ess-decode"]["spec"]["leaderWorkerTemplate"]
    paths = {path for door in status_routes.DOORS for path in door.paths}
    for name in ("ess-prefill", "ess-decode"):
        document = [d for d in DOCUMENTS if d["metadata"]["name"] == name][-1]
        spec, [container] = spec_of(document), spec_of(document)["containers"]
        settings = read(containers()[name][1:], tmp_path, monkeypatch)
        assert container["ports"][0]["containerPort"] == settings.port
        assert spec["terminationGracePeriodSeconds"] > settings.drain_s + settings.drain_grace_s
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["path"] in paths
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert group["size"] == settings.dp_size
    assert group["restartPolicy"] == "None"


def test_the_router_is_told_of_every_pod():
    words = containers()["ess-router"]
    told = {words[at + 1] for at, word in enumerate(words) if word in ("--prefill", "--decode")}
    pods = ["ess-decode-0", *(f"ess-decode-0-{index}" for index in (1, 2, 3))]
    assert told == {
        "http://ess-prefill-0.ess-prefill:8000",
        *(f"http://{pod}.ess-decode:8000" for pod in pods),
    }


@pytest.mark.parametrize("pod", ["ess-prefill-0", "ess-decode-0", "ess-decode-0-3"])
def test_a_pod_answers_under_the_name_by_which_it_is_asked(pod, tmp_path, monkeypatch):
    """Without a key a server answers its own names alone; a wrong one would be a 403 for each
    request, behind a router whose probes are well."""
    monkeypatch.setitem(STANDS_FOR, "POD_NAME", pod)
    group = "-".join(pod.split("-")[:2])
    settings = read(containers()[group][1:], tmp_path, monkeypatch)
    [asked] = {word for word in containers()["ess-router"] if word.startswith(f"http://{pod}.")}
    host = asked.removeprefix("http://").encode()
    check_page([(b"host", host)], settings.hosts)
    with pytest.raises(Foreign):
        check_page([(b"host", b"other." + host)], settings.hosts)


def router_lines() -> list[list[str]]:
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "README.md").read_text())
    return [containers()["ess-router"][4:], shlex.split(re.search(r"smg launch (.*)", text)[1])]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="smg is not installed")
@pytest.mark.parametrize("words", router_lines(), ids=["kubernetes.yaml", "README.md"])
def test_the_router_takes_its_command_line(words):
    done = python("-m", "smg", "launch", *words, "--help")
    assert done.returncode == 0, done.stderr


def test_the_job_is_a_script_that_bash_can_read():
    done = subprocess.run(["bash", "-n", DEPLOY / "slurm.sbatch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_loop_of_the_job_ends_behind_its_server(tmp_path):
    """Slurm tells all processes of a step to end, and kills the others once the shell has ended."""
    server = tmp_path / "ess"
    server.write_text("#!/bin/bash\ntrap 'echo ended; exit' TERM\necho up\nsleep 60 & wait\n")
    server.chmod(0o700)
    words = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_PROCID": "0"}
    loops = (DEPLOY / "slurm.sbatch").read_text().split("bash -c '")[1:]
    for loop in loops:
        command = ["bash", "-c", loop.partition("'")[0]]
        with subprocess.Popen(
            command, env=words, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as step:
            assert step.stdout.readline() == "up\n"
            os.killpg(step.pid, signal.SIGTERM)
            assert step.communicate(timeout=60) == ("ended\n", None)
            assert step.returncode == 0
    assert len(loops) == 2


def test_units_tell_the_server_alone_to_end():
    texts = [path.read_text() for path in DEPLOY.glob("*.service")]
    assert [text.count("\nKillMode=mixed\n") for text in texts] == [1, 1]
