"""`ess`: one table of subcommands; each is imported when it is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

import cyclopts

import ess
from ess import console
from ess.console import Command

SUMMARY: Final = "Sparse-attention decoding with the latent cache in host memory."

SETTINGS: Final = (
    "Every flag is also a key of --config FILE, and a variable: ESS_MAX_RUNNING=8 is "
    "--max-running 8. Flags of vLLM and SGLang with the same meaning work too."
)

COMMANDS: Final = (
    Command(
        name="serve",
        home="ess.server.commands.serve:serve",
        summary="Serve a model over HTTP.",
        group="Serve",
        more=SETTINGS,
    ),
    Command(
        name="chat",
        home="ess.server.commands.chat_cli:chat",
        summary="Talk to a running server.",
        group="Serve",
    ),
    Command(
        name="top",
        home="ess.server.commands.chat_cli:top",
        summary="Watch what a running server does.",
        group="Serve",
    ),
    Command(
        name="doctor",
        home="ess.server.commands.doctor:doctor",
        summary="Check what this machine can run, and what is missing.",
        group="Serve",
    ),
    Command(
        name="prefill",
        home="ess.server.commands.serve:prefill",
        summary="Compute prompts for decode workers.",
        group="Prefill and decode in two workers",
        more=SETTINGS,
    ),
    Command(
        name="decode",
        home="ess.server.commands.serve:decode",
        summary="Generate answers to prompts that prefill workers have computed.",
        group="Prefill and decode in two workers",
        more=SETTINGS,
    ),
    Command(
        name="plan",
        home="ess.server.commands.planning.plan:plan",
        summary="What fits on given GPUs, how fast, and what limits it.",
        group="Plan",
    ),
    Command(
        name="sim",
        home="ess.server.commands.planning.sim:sim",
        summary="Replay arriving requests with and without offload: delays, rates, memory.",
        group="Plan",
    ),
    Command(
        name="layout",
        home="ess.server.commands.about:layout",
        summary="What a token of a model costs, and what fits in given memory.",
        group="Plan",
    ),
    Command(
        name="build-kernels",
        home="ess.server.commands.build_kernels:build_kernels",
        summary="Compile the CUDA kernels ahead of time; no GPU is needed.",
        group="Install",
    ),
    Command(
        name="version",
        home="ess.server.commands.about:version",
        summary="The version of ESS and of what it runs on.",
        group="Install",
    ),
)


def make_app() -> cyclopts.App:
    return console.make_app("ess", summary=SUMMARY, version=ess.__version__, commands=COMMANDS)


def main(arguments: Sequence[str] | None = None) -> int:
    return console.run(make_app(), arguments)


if __name__ == "__main__":
    sys.exit(main())
