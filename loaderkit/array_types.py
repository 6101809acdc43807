"""Arrays of numpy by what is in them, for annotations.

A file that names these imports them under ``TYPE_CHECKING``: nothing is imported when
the program runs.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
"""Rows, numbers of samples, sizes, offsets."""
Bools: TypeAlias = NDArray[np.bool_]
"""What holds of each."""
Floats: TypeAlias = NDArray[np.float64]
