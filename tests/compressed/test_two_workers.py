"""DeepSeek-V4 prefilled in one process and decoded in another: engines by themselves, and servers
behind a router."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any

import pytest

from ess.engine.process.messages import Add, Handoff
from ess.engine.tokens.sampling import Sampling
from ess.models.load import load_model
from ess.server.commands.pd.routers import ROUTERS
from tests.pd.processes import adds, engines, handed_over
from tests.pd.stand import ENDED
from tests.pd.test_two_processes import arriving, counts, met
from tests.ranks.test_serve import COUNT, PROMPT, tokens
from tests.server.harness import until
from tests.states.world import LINE, OTHER
from tests.support.few import few
from tests.support.greedy import greedy
from tests.support.process import Process
from tests.support.routers import ask

pytestmark = pytest.mark.slow

TRANSPORTS = ("tcp", "shared")
"""Each loses a worker; over TCP other models' prompts are compared too."""
MADE = 12
WISH = Sampling(tokens_max=MADE, ignore_eos=True)
PROMPTS = [
    *(LINE[:length] for length in (1, 3, 4, 255, 256, 257, 700)),
    [*LINE[:600], *OTHER[:50]],
    LINE[:700],
]


def told(folder: Path, prompt: list[int], count: int = MADE) -> list[int]:
    return greedy(load_model(folder, form="f32"), prompt, count)


def workers(folder: Path, transport: str, **decode: str) -> list[dict[str, Any]]:
    alike = {"model": folder, "transport": transport}
    return [{"role": "prefill", **alike}, {"role": "decode", **alike, **decode}]


@pytest.mark.parametrize("transport", few(TRANSPORTS[1:], all_of=TRANSPORTS))
def test_tokens_of_two_processes_are_those_of_the_plain_model(
    folder: Path, tmp_path: Path, transport: str
) -> None:
    asked = adds(PROMPTS, WISH)
    with engines(tmp_path, *workers(folder, transport)) as [prefill, decode]:
        peer = met(prefill, decode)
        for add in asked:
            handed_over(add, prefill, decode, uid=add.number + 1, peer=peer)
            decode.ended(add.number)
            assert decode.tokens(add.number) == told(folder, list(add.prompt)), add.number
        prefill.ended(*(add.number for add in asked))
        decode.until(lambda _: counts(decode) == (len(asked), 0, 0, 0))
        assert [prefill.stop(), decode.stop()] == [0, 0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prefill_worker_that_is_killed_is_done_without(
    folder: Path, tmp_path: Path, transport: str
) -> None:
    """A prompt of which rows are cached without a state is computed from its beginning."""
    with engines(tmp_path, *workers(folder, transport)) as [prefill, decode]:
        peer = met(prefill, decode)
        first, second = adds([LINE[:530], LINE[:700]], WISH)
        handed_over(first, prefill, decode, uid=1, peer=peer)
        decode.ended(0)
        decode.say(Add(second.number, second.prompt, WISH, handoff=Handoff(2, peer, "take")))
        decode.until(lambda _: arriving(decode) == 1)
        prefill.process.send_signal(signal.SIGKILL)
        decode.ended(1)
        assert decode.tokens(1) == told(folder, LINE[:700])
        decode.until(lambda _: counts(decode)[:2] == (1, 1))


def test_workers_of_other_rows_do_not_meet(folder: Path, tmp_path: Path) -> None:
    prefill, decode = workers(folder, "tcp")
    with engines(tmp_path, {**prefill, "row": "bf16"}, decode) as [other, ours]:
        assert "another model" in ours.meet(other.ready().metadata).sentence


def test_a_router_before_both(folder: Path) -> None:
    """`ess serve --pd`: with a handoff and without, the same is said."""
    here = [router.name for router in ROUTERS if importlib.util.find_spec(router.name)]
    native = [name for name in here if name != "vllm_router"]
    if not native:
        pytest.skip("no router that passes token ids on is installed: extra `router`")
    flags = ("--pd", "1p1d", "--router", native[0], "--model", str(folder))
    forms = ("--served-model-name", "ess-embedded", "--dtype", "f32", "--row", "f32")
    wish = {"max_new_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": wish}
    with Process(*flags, *forms, "--host-bytes", "192MiB") as pd:
        urls = {line["name"]: line["url"] for line in pd.greeting["processes"]}
        until(lambda: ask(f"{pd.url}/generate", body).status == 200, "service")
        expected = told(folder, PROMPT, COUNT)
        assert ask(f"{pd.url}/generate", body).document["output_ids"] == expected
        assert list(tokens(urls["decode-1"])) == expected
        ended = dict(ENDED.findall(ask(f"{urls['decode-1']}/metrics").text))
        assert float(ended["landed"]) >= 2
        assert float(ended["missed"]) == 0
