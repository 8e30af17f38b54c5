"""The pictures in the documents: the dashboard's are always the same ones from one recording, those
of the chat page show what smollm2 answers.

python -m tests.server.screens                the pictures in docs/screens
python -m tests.server.screens --record       a new recording, from a server under load
"""

from __future__ import annotations

import argparse
import json
import time
from importlib import resources
from pathlib import Path

from tests.server.harness import PacedEngine, Served, counting
from tests.support.chromium import Browser
from tests.support.crowd import Crowd
from tests.support.process import Process

ROOT = Path(__file__).resolve().parents[2]
RECORDING = "demo.json"
DESK, PHONE = (1280, 800), (390, 844)
CHAT = (960, 560)
QUESTIONS = ("What is the capital of France?", "And of Italy?")
LOADED = (
    *("--max-running", "8", "--max-waiting", "16", "--max-model-len", "4k"),
    *("--slot-bytes", "20MiB"),
)
RECORD_S = 62.0


def crowd(count: int) -> list[dict]:
    """Prompts long enough that their rows do not all find slots, all different."""
    return [
        {
            "prompt": [300 + (7 * number + j * j) % 3000 for j in range(1200 + 50 * number)],
            "max_tokens": 1500 if number else 200,
            "seed": number,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        for number in range(count)
    ]


def record(target: Path) -> None:
    with Process(*LOADED).wait_ready() as process, Crowd(process.url, crowd(6)), Browser() as page:
        page.go(process.url + "/dashboard")
        running = "[...document.querySelectorAll('#requests tr')].filter("
        running += "(row) => row.cells[1].textContent === 'decoding').length"
        page.until(f"{running} >= 4", within_s=300)
        time.sleep(RECORD_S)
        page.value("document.getElementById('save').click()")
        saved = json.loads(page.downloaded("ess-recording.json"))
    saved["history"] = saved["history"][::2]
    saved["frames"] = [saved["frames"][0], *saved["frames"][-7:]]
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(saved, separators=(",", ":")) + "\n")


def shoot(folder: Path) -> list[Path]:
    made = []
    with Served(PacedEngine(counting(1))) as served, Browser() as page:
        page.go(f"{served.url}/dashboard?replay={RECORDING}")
        page.until("document.body.dataset.replayed === ''")
        for scheme in ("light", "dark"):
            for name, size, phone in (("desk", DESK, False), ("phone", PHONE, True)):
                page.dress(scheme)
                page.resize(*size, scale=2.0 if phone else 1.0, phone=phone)
                path = folder / f"dashboard-{name}-{scheme}.png"
                path.write_bytes(page.still(whole=phone))
                made.append(path)
        assert not page.errors(), page.errors()
    return made


def ask(page: Browser, question: str, *, answered: int) -> None:
    """Returns when so many answers are whole."""
    page.until("!document.getElementById('send').disabled")
    page.value(f"document.getElementById('question').value = {question!r}")
    page.value("document.getElementById('question').focus()")
    page.press("Enter")
    figures = "document.querySelectorAll('.figures:not(:empty)').length"
    page.until(f"{figures} === {answered}", within_s=60)


def shoot_chat(folder: Path) -> list[Path]:
    """The first answer, during which the engine still warms up, is in no picture."""
    made = []
    with Process("smollm2").wait_ready() as process, Browser() as page:
        page.resize(*CHAT)
        page.go(process.url + "/chat")
        page.value("document.getElementById('temperature').value = '0'")
        ask(page, QUESTIONS[0], answered=1)
        page.value("document.getElementById('fresh').click()")
        for number, question in enumerate(QUESTIONS, start=1):
            ask(page, question, answered=number)
        for scheme in ("light", "dark"):
            page.dress(scheme)
            path = folder / f"chat-{scheme}.png"
            path.write_bytes(page.still())
            made.append(path)
        assert not page.errors(), page.errors()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        record(Path(str(resources.files("ess.server.http"))) / "recordings" / RECORDING)
    folder = ROOT / "docs" / "screens"
    folder.mkdir(exist_ok=True)
    for path in (*shoot(folder), *shoot_chat(folder)):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
