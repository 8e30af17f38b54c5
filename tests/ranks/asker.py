"""A client on a host of its own: asks several servers at once, when all of them are ready, and
prints their tokens.

python -m tests.ranks.asker COUNT TOKEN,TOKEN,... URL...
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

POLL_S = 0.05


def wait_ready(url: str) -> None:
    """For as long as we are let live."""
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=30):
                return
        except (OSError, urllib.error.HTTPError):
            time.sleep(POLL_S)


def tokens(url: str, prompt: list[int], count: int) -> list[int]:
    asked = {
        "model": "ess-embedded",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(asked).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def main(count: str, prompt: str, *urls: str) -> None:
    words = [int(token) for token in prompt.split(",")]
    with ThreadPoolExecutor(len(urls)) as pool:
        list(pool.map(wait_ready, urls))
        made = [pool.submit(tokens, url, words, int(count)) for url in urls]
        print(json.dumps([each.result() for each in made]))


if __name__ == "__main__":
    main(*sys.argv[1:])
