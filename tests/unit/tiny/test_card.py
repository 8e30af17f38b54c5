from __future__ import annotations

from ess.models.tiny.trainer.card import card_text

NUMBERS = {
    "dtype": "bfloat16",
    "weights": 19_000_000,
    "file_bytes": 23_900_000,
    "top_k": 256,
    "held_out_bytes": 3_000_000,
    "held_out_tokens": 1_000_000,
    "share": 0.5,
    "scored": 500_000,
    "nats_per_token": 4.0,
    "bits_per_byte": 1.834,
    "xz_bits_per_byte": 1.9,
    "ngram_bits_per_byte": 2.04,
    "packages": [{"package": "some-doc", "bits_per_byte": 1.7}],
    "draft_count": 1000,
    "draft_agreement": 0.61234,
    "draft_chance": 0.35,
    "recall": [
        {"layer": 0, "captured": 0.8, "best": 0.9},
        {"layer": 1, "captured": 0.7, "best": 0.8},
    ],
    "samples": ["one\n\nline"],
    "corpus": [
        {
            "package": "some-doc",
            "licence": "MIT",
            "role": "held-out",
            "documents": 3,
            "bytes": 5_000_000,
        }
    ],
}
TRAINING = {"tokens": 9_000_000, "minutes": 17.0, "workers": 2}


def test_card_says_the_numbers_it_was_given() -> None:
    card = card_text(NUMBERS, TRAINING, "Two runs.")
    for said in (
        "**1.834**",
        "| this model, some-doc | 1.700 |",
        "61.2% equal",
        "| layer | 0 | MTP |",
        "| indexer | 0.800 | 0.700 |",
        "> one line",
        "| some-doc | MIT | held-out | 5.00 |",
        "9.0 M tokens",
        "--minutes 17",
        "2 workers. Two runs. The context limit",
    ):
        assert said in card, said
    assert "{" not in card
    assert "is peaked" not in card


def test_card_warns_where_recall_is_easy() -> None:
    easy = [{"layer": layer, "captured": 0.99, "best": 1.0} for layer in range(2)]
    card = card_text(NUMBERS | {"recall": easy}, TRAINING, "")
    assert "is peaked. In every layer of the trunk 256" in card
