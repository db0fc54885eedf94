"""Whether numbers are finite: a checkpoint's, those of parameters, a call's results."""

import numpy as np
from numpy.typing import ArrayLike

from flax_models.common.config import VisionConfig, check_name
from flax_models.common.grid import as_grid
from flax_models.common.layout import OUTPUTS, output_rows


def is_finite(array: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Whether floating-point numbers are, all along an axis or all there are, as bool.

    As integers of either sign, infinities and NaN are the largest of their sign's numbers: a few
    times as fast as to ask each 16-bit number, and without memory for the answers.
    """
    signed, unsigned = (array.view(f"{kind}{array.dtype.itemsize}") for kind in "iu")
    infinities = np.array([np.inf, -np.inf], array.dtype)
    infinity, minus_infinity = infinities.view(signed.dtype)[0], infinities.view(unsigned.dtype)[1]
    return (signed.max(axis) < infinity) & (unsigned.max(axis) < minus_infinity)


def non_finite_images(
    config: VisionConfig, grid_thw: ArrayLike, finite_rows: np.ndarray, output: str
) -> list[int]:
    """Which images have a row that is not finite.

    Args:
        config: of the tower that made the rows.
        grid_thw: [images, 3] integers, the call's.
        finite_rows: [rows] bool, of each row of the output whether it is finite.
        output: the call's, one of `OUTPUTS`.

    Returns:
        The images' numbers, from 0.

    Raises:
        ValueError: a bad grid, one of another number of rows, or an unknown `output`.
    """
    check_name("output", output, OUTPUTS)
    ends = np.cumsum(output_rows(config, as_grid(config, grid_thw), output))
    if len(finite_rows) != ends[-1]:
        raise ValueError(f"grid_thw asks for {ends[-1]} rows of {output}, got {len(finite_rows)}")
    images = np.split(finite_rows, ends[:-1])
    return [number for number, rows in enumerate(images) if not rows.all()]
