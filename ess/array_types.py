"""Types of NumPy arrays that several modules share, by what their numbers are."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int32]
RowIds: TypeAlias = Ints
SlotIds: TypeAlias = Ints
PageIds: TypeAlias = Ints
Counts: TypeAlias = npt.NDArray[np.int64]
