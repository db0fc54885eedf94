"""Whether numbers are finite: those of a checkpoint, of a tower's parameters, of its results."""

import numpy as np


def is_finite(array: np.ndarray) -> bool:
    """Whether all of a floating-point array is; it is read twice and no copy is made.

    As integers of either sign, infinities and NaN are the largest of their sign's numbers.
    """
    signed, unsigned = (array.view(f"{kind}{array.dtype.itemsize}") for kind in "iu")
    infinity = np.array(np.inf, array.dtype)
    return bool(
        signed.max() < infinity.view(signed.dtype)
        and unsigned.max() < (-infinity).view(unsigned.dtype)
    )
