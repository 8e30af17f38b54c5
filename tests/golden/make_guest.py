"""Writes guest.npz: what transformers 5.23 answers from the guest's own GGUF file.

    python tests/golden/make_guest.py     (extra `oracle`, and accelerate; fetches the file)

Prompts are in the chat format. Of the logits every 389th column is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from ess.models.guest.pins import SMOLLM2  # noqa: E402
from ess.models.guest.place import gguf_file  # noqa: E402

COLUMNS, STEPS = slice(None, None, 389), 24
QUESTIONS = (
    "Why is the sky blue? Answer in one sentence.",
    "Write a Python function that adds the numbers from 1 to 2048.",
    "List three birds that can't fly.",
)


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = gguf_file(SMOLLM2)
    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    arrays: dict[str, np.ndarray] = {}
    for number, question in enumerate(QUESTIONS):
        turns = [{"role": "user", "content": question}]
        written = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([tokenizer.encode(written)])
        with torch.inference_mode():
            logits = model(ids).logits[0, :, COLUMNS]
            said = model.generate(ids, max_new_tokens=STEPS, do_sample=False)[0, ids.shape[1] :]
        arrays |= {
            f"{number}.written": np.frombuffer(written.encode(), np.uint8),
            f"{number}.tokens": ids[0].numpy().astype(np.uint16),
            f"{number}.logits": logits.numpy(),
            f"{number}.greedy": said.numpy().astype(np.uint16),
        }
        print(tokenizer.decode(said))
    np.savez_compressed(HERE / "guest.npz", **arrays)


if __name__ == "__main__":
    main()
