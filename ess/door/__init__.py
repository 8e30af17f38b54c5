"""The library door: pools, FlashTrans and lanes joined for an engine of your own."""

from ess.door.offload import Offload
from ess.door.sequences.sequence import Sequence
from ess.door.steps.placement import LayerMemory, Placement, Resolution
from ess.door.steps.step import Step

__all__ = ["LayerMemory", "Offload", "Placement", "Resolution", "Sequence", "Step"]
