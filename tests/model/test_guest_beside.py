"""A guest beside llama.cpp, which a stand-in library replaces that works or fails as the test
chooses."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ess.bench.locality.guest_beside import PACKAGE, vs_llama_benchmark
from ess.errors import BadState, Unavailable


class Library(ModuleType):
    """Keeps what it is asked; makes `short` tokens too few."""

    def __init__(self, short: int = 0) -> None:
        super().__init__(PACKAGE)
        self.settings: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.short = short

    def CommonParams(self) -> Any:
        parts = {name: SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch")}
        return SimpleNamespace(**parts)

    def Server(self, settings: Any) -> Any:
        self.settings.append(settings)
        return SimpleNamespace(handle_completions=self._said)

    def _said(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(asked)
        read = 1 if asked["cache_prompt"] else len(asked["prompt"])
        return {"timings": {"prompt_n": read, "predicted_n": asked["n_predict"] - self.short}}


def test_both_are_asked_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, PACKAGE, library)
    rows = vs_llama_benchmark(smoke=True)
    [settings] = library.settings
    assert settings.model.path == "smoke.gguf"
    assert settings.cpuparams.n_threads == settings.cpuparams_batch.n_threads == 1
    assert [(len(a["prompt"]), a["n_predict"]) for a in library.asked] == [(64, 1), (64, 8)] * 2
    assert [row.name for row in rows] == ["prompt, threads: 1", "decode, threads: 1"]
    for row in rows:
        assert row.baseline == "llama.cpp"
        assert row.config == {"prompt": 64, "tokens": 8, "threads": 1, "clock": "processor"}


def test_a_rival_that_does_less_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, Library(short=1))
    with pytest.raises(BadState, match=r"read and made \(64, 0\) tokens, not \(64, 1\)"):
        vs_llama_benchmark(smoke=True)


def test_where_it_is_absent_the_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(Unavailable, match=r"pip install xllamacpp, a wheel of 34 MB"):
        vs_llama_benchmark(smoke=True)
