"""The library door: pools, FlashTrans and lanes joined for somebody else's engine."""

from ess.door.offload import Offload
from ess.door.sequence import Promise, Sequence
from ess.door.step import Resolution, Step

__all__ = ["Offload", "Promise", "Resolution", "Sequence", "Step"]
