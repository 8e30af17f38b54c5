"""The library door: pools, FlashTrans and lanes joined for somebody else's engine."""

from ess.door.offload import Offload
from ess.door.sequence import Sequence
from ess.door.step import Resolution, Step

__all__ = ["Offload", "Resolution", "Sequence", "Step"]
