"""Whether offload of blocks of keys and values would pay, by bytes alone.

A step reads the weights of a rank once and, of each request, all index keys, the chosen blocks, a
state twice, and layers that read everything; then it waits for the blocks that are missing. Nothing
is hidden, nothing else costs time. Sizes are those of the configuration classes of transformers
5.23; blocks of Qwen4-exp have 4 tokens, which its class does not say, and 57 of 60 layers of
MiniMax-M3 are sparse.

    python docs/examples/blocks.py
"""

from __future__ import annotations

from dataclasses import dataclass

ROOM = 100e9  # of a GPU, for requests
WEIGHTS = 30e9  # that a step reads
MEMORY, LINK = 4.8e12, 50e9  # an H200's, and what gathers reach: bytes a second
SLOTS = 6400  # tokens of each sparse layer and request
CONTEXTS = {"32K": 1 << 15, "128K": 1 << 17, "512K": 1 << 19, "1M": 1 << 20}


@dataclass(frozen=True)
class Family:
    name: str
    layers: int  # that choose
    dense_layers: int  # that read everything
    token_bytes: int  # of keys and values in a layer
    key_bytes: int  # of index keys in a layer, a token
    chosen: int  # tokens that are read in a layer
    state: float = 0.0

    def kept(self, tokens: int) -> float:
        """On the device either way."""
        dense = self.dense_layers * self.token_bytes
        return tokens * (self.layers * self.key_bytes + dense) + self.state

    def batches(self, tokens: int) -> tuple[int, int]:
        """Resident, and with offload."""
        rows = self.layers * self.token_bytes
        each = (self.kept(tokens) + rows * count for count in (tokens, min(tokens, SLOTS)))
        resident, offloaded = (int(ROOM // size) for size in each)
        return resident, offloaded

    def read(self, tokens: int) -> float:
        return self.kept(tokens) + self.state + self.chosen_bytes

    @property
    def chosen_bytes(self) -> float:
        return self.layers * self.chosen * self.token_bytes

    def step(self, batch: int, tokens: int) -> float:
        return (WEIGHTS + batch * self.read(tokens)) / MEMORY


FAMILIES = (
    Family("Qwen4-exp", 10, 0, 2048, 64, 2048, state=64e6),
    Family("MiniMax-M3", 57, 3, 2048, 256, 2048),
)


def main() -> None:
    print("family     context  resident  offloaded  none missing  one in twenty  pays below")
    for family in FAMILIES:
        for name, tokens in CONTEXTS.items():
            few, many = family.batches(tokens)
            if not few:
                print(f"{family.name:<10} {name:>7} {few:>9} {many:>10}  resident none fits")
                continue
            rate = few / family.step(few, tokens)
            step, wait = family.step(many, tokens), many * family.chosen_bytes / LINK
            gains = [many / (step + share * wait) / rate for share in (0.0, 0.05)]
            below = min(1.0, max(0.0, (many / rate - step) / wait))
            print(
                f"{family.name:<10} {name:>7} {few:>9} {many:>10} {gains[0]:>13.2f}"
                f" {gains[1]:>14.2f} {below:>11.0%}"
            )


if __name__ == "__main__":
    main()
