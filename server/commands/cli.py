"""`ess`: one table of subcommands; each is imported when it is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

import ess
from ess import console
from ess.console import Command

SUMMARY: Final = "Sparse-attention decoding with the latent cache in host memory."

COMMANDS: Final = (
    Command(
        name="build-kernels",
        home="ess.server.commands.build_kernels:build_kernels",
        summary="Compile the CUDA kernels ahead of time; no GPU is needed.",
    ),
    Command(
        name="chat",
        home="ess.server.commands.chat_cli:chat",
        summary="Talk to a running server.",
    ),
    Command(
        name="decode",
        home="ess.server.commands.serve:decode",
        summary="Generate answers to prompts that prefill workers have computed.",
    ),
    Command(
        name="doctor",
        home="ess.server.commands.doctor:doctor",
        summary="Check what this machine can run, and what is missing.",
    ),
    Command(
        name="layout",
        home="ess.server.commands.about:layout",
        summary="What a token of a model costs, and what fits in given memory.",
    ),
    Command(
        name="plan",
        home="ess.server.commands.planning.plan:plan",
        summary="What fits on given GPUs, how fast, and what limits it.",
    ),
    Command(
        name="prefill",
        home="ess.server.commands.serve:prefill",
        summary="Compute prompts for decode workers.",
    ),
    Command(
        name="serve",
        home="ess.server.commands.serve:serve",
        summary="Serve a model over HTTP.",
    ),
    Command(
        name="sim",
        home="ess.server.commands.planning.sim:sim",
        summary="Replay arriving requests with and without offload: delays, rates, memory.",
    ),
    Command(
        name="top",
        home="ess.server.commands.chat_cli:top",
        summary="Watch what a running server does.",
    ),
    Command(
        name="version",
        home="ess.server.commands.about:version",
        summary="The version of ESS and of what it runs on.",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    app = console.make_app("ess", summary=SUMMARY, version=ess.__version__, commands=COMMANDS)
    return console.run(app, arguments)


if __name__ == "__main__":
    sys.exit(main())
