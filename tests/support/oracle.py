"""transformers as the third party: its logits, caches and selections for the same checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor
    rows: list[torch.Tensor]
    keys: list[torch.Tensor | None]
    selections: list[torch.Tensor]


class Oracle:
    """One transformers model; `read` feeds it tokens in the given pieces through its own cache."""

    def __init__(self, folder: Path, raw: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        import transformers
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(raw))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self._model = (
            getattr(transformers, raw["architectures"][0])
            .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            .eval()
        )
        self._rope_dim = raw.get("text_config", raw)["qk_rope_head_dim"]
        self._pairs_split = raw["model_type"] == "glm_moe_dsa"
        self._chosen: list[torch.Tensor] = []
        text = getattr(self._model.model, "language_model", self._model.model)
        for layer in text.layers:
            if getattr(layer.self_attn, "indexer", None) is not None:
                layer.self_attn.indexer.register_forward_hook(self._note)

    def save(self, folder: Path) -> None:
        self._model.save_pretrained(folder)

    def rotary(self) -> tuple[torch.Tensor, float]:
        """The frequencies of its rope, and its factor on cos and sin."""
        rotary = self._model.model.rotary_emb
        return rotary.inv_freq, rotary.attention_scaling

    def _note(self, module: object, arguments: object, chosen: torch.Tensor) -> None:
        self._chosen.append(chosen[0])

    def logits(self, tokens: list[int], pieces: list[int]) -> torch.Tensor:
        """`pieces` are token counts that sum to the length."""
        return self._run(tokens, pieces)[0]

    def read(self, tokens: list[int], pieces: list[int]) -> Answer:
        """And what it caches. Selections are of the last piece."""
        logits, past = self._run(tokens, pieces)
        return Answer(
            logits,
            [torch.cat((s.keys[0, 0], interleave(s.values[0, 0])), -1) for s in past.layers],
            [self._keys(layer) for layer in past.layers],
            list(self._chosen),
        )

    @torch.inference_mode()
    def _run(self, tokens: list[int], pieces: list[int]) -> tuple[torch.Tensor, Any]:
        past, logits, start = None, [], 0
        for count in pieces:
            self._chosen.clear()
            ids = torch.tensor([tokens[start : start + count]])
            result = self._model(ids, past_key_values=past, use_cache=True)
            past, start = result.past_key_values, start + count
            logits.append(result.logits[0])
        return torch.cat(logits), past

    @torch.inference_mode()
    def side_by_side(self, lines: list[list[int]]) -> torch.Tensor:
        """Logits of several sequences of one length."""
        logits: torch.Tensor = self._model(torch.tensor(lines)).logits
        return logits

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        past, feed, tokens_made = None, prompt, []
        while len(tokens_made) < count:
            result = self._model(torch.tensor([feed]), past_key_values=past, use_cache=True)
            past, feed = result.past_key_values, [int(result.logits[0, -1].argmax())]
            tokens_made += feed
        return tokens_made

    def _keys(self, past: Any) -> torch.Tensor | None:
        if not past.is_indexer_initialized:
            return None
        keys: torch.Tensor = past.indexer_keys[0]
        if not self._pairs_split:
            return keys
        return torch.cat((interleave(keys[:, : self._rope_dim]), keys[:, self._rope_dim :]), -1)


def interleave(x: torch.Tensor) -> torch.Tensor:
    """transformers leaves rotated pairs as [all first | all second]; the cache format has pairs."""
    first, second = x.chunk(2, -1)
    return torch.stack((first, second), -1).flatten(-2)
