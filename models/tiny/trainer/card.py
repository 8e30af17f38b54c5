"""The model card, filled in with the numbers of evaluate.py and nothing else."""

from __future__ import annotations

from typing import Any

_TEXT = """---
license: apache-2.0
language: en
---

# ess-embedded: a toy with the real anatomy

A DeepSeek-V3.2 in miniature: latent attention with rows of 512 + 64 values, a trained lightning
indexer, group-limited experts, an MTP module, fp8 blocks of 128 x 128 under the published tensor
names. {weights:.1f} M stored weights, {megabytes:.1f} MB. It exists so that every part of ESS
runs on a laptop with a model that is neither random nor downloaded.

## What it is not

Not an assistant, not a source of facts, not tuned to follow instructions. It has read
{tokens_seen:.1f} M tokens of software documentation and nothing else, and continues text in that
manner. Names, options and versions it writes are inventions. Its training text was published by
projects that did not write for this purpose and do not endorse it.

## Numbers

Held-out text: {held_out_megabytes:.2f} MB of packages that were set apart before training;
training has none of their paragraphs. Weights as stored, {dtype} arithmetic, top-{top_k} selection
by the model's own indexer, windows of 1,024 that overlap by 256; {share:.0%} of the windows, spread
evenly, {scored:,} tokens.

| on the held-out packages | bits per byte |
|---|---|
| this model | **{bits_per_byte:.3f}** |
| xz -9e, all of the text as one stream | {xz_bits_per_byte:.3f} |
| 5-gram (Kneser-Ney) of all of the training text | {ngram_bits_per_byte:.3f} |
{packages}

{nats_per_token:.3f} nats per token of {bytes_per_token:.2f} bytes.

MTP, first draft, on {draft_count:,} held-out tokens (true text before each of them, never the
model's own): {draft_agreement:.1%} equal the main model's first choice; a token drawn
from the main model at temperature 1 equals the draft {draft_chance:.1%} of the time.

Attention mass inside the selected {top_k} positions, queries {top_k} to 1,023 (best = the
most any {top_k} positions hold):

| layer | {layers} |
|---|{dashes}|
| indexer | {captured} |
| best | {best} |
{peaked}
## Two lines of what it says

{samples}

## Text

Documentation out of Debian 12 packages, permissively licensed or in the public domain. Each
package is on one side only; paragraphs are kept once, and training drops every paragraph and every
line of 60 characters or more that held-out has.

| package | licence | side | MB |
|---|---|---|---|
{corpus}

## Making it again

```
python -m ess.models.tiny.trainer.texts.corpus --into FOLDER
python -m ess.models.tiny.trainer.texts.vocabulary --folder FOLDER
python -m ess.models.tiny.trainer.train --folder FOLDER --minutes {minutes:.0f}
python -m ess.models.tiny.trainer.export --folder FOLDER
python -m ess.models.tiny.trainer.evaluate --folder FOLDER --card
```

`minutes` is processor time of each of {workers} workers. {note}The context limit
of 131,072 tokens is a path through the system (YaRN x 32, trained with from the first step):
sequences in training had 256 to 1,024 tokens, and quality beyond that is not claimed.
"""

_PEAKED = """
Read these with care: this model's attention is peaked. In every layer of the trunk {top_k}
positions can hold all of it, so a high recall is easier here than in a large model.
"""


def card_text(numbers: dict[str, Any], training: dict[str, Any], note: str) -> str:
    """The card. `training` has tokens, minutes and workers of the run; `note` its history."""
    recall, corpus = numbers["recall"], numbers["corpus"]
    bests = [row["best"] for row in recall[:-1]]
    names = [f"{row['layer']}" for row in recall[:-1]] + ["MTP"]
    packages = [
        f"| this model, {p['package']} | {p['bits_per_byte']:.3f} |" for p in numbers["packages"]
    ]
    texts = [
        f"| {p['package']} | {p['licence']} | {p['role']} | {p['bytes'] / 1e6:.2f} |"
        for p in corpus
    ]
    plain = {
        name: numbers[name] for name in numbers if isinstance(numbers[name], int | float | str)
    }
    return _TEXT.format(
        **plain | {"weights": numbers["weights"] / 1e6},
        megabytes=numbers["file_bytes"] / 1e6,
        held_out_megabytes=numbers["held_out_bytes"] / 1e6,
        bytes_per_token=numbers["held_out_bytes"] / numbers["held_out_tokens"],
        tokens_seen=training["tokens"] / 1e6,
        minutes=training["minutes"],
        workers=training["workers"],
        peaked=_PEAKED.format(top_k=numbers["top_k"]) if min(bests) > 0.999 else "",
        note=f"{note} " if note else "",
        packages="\n".join(packages),
        layers=" | ".join(names),
        dashes="---|" * (len(names) - 1) + "---",
        captured=" | ".join(f"{row['captured']:.3f}" for row in recall),
        best=" | ".join(f"{row['best']:.3f}" for row in recall),
        samples="\n".join(f"> {' '.join(sample.split())}\n" for sample in numbers["samples"]),
        corpus="\n".join(texts),
    )
