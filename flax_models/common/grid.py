"""Grids of patches: checking what a caller gives, and the totals that follow from it."""

from functools import lru_cache
from typing import Any

import numpy as np

from flax_models.common.config import VisionConfig

# Above this many tokens the patches alone are 158 GB in bf16, more than an accelerator holds;
# planning such a grid would only exhaust the host's memory first.
MAX_TOKENS = 1 << 26


def as_grid(config: VisionConfig, grid_thw: Any) -> np.ndarray:
    """Check the grids of some images and clips.

    Args:
        config: the tower's configuration.
        grid_thw: [images, 3] integers, anything `np.asarray` takes: frames (after the temporal
            patch), rows and columns of each image or clip, in patches.

    Returns:
        The grid as a C-contiguous int64 array [images, 3].

    Raises:
        ValueError: another shape or dtype; a value below 1; rows or columns not divisible by
            `spatial_merge_size` (the message names the image); more than `MAX_TOKENS` patches in
            all. Nothing that grows with the patches has been allocated by then.
    """
    grid = np.asarray(grid_thw)
    if grid.ndim != 2 or grid.shape[1] != 3 or grid.shape[0] == 0:
        raise ValueError(
            f"grid_thw must have shape [images, 3] with at least one image, got {list(grid.shape)}"
        )
    if grid.dtype.kind not in "iu":
        raise ValueError(f"grid_thw must hold integers, got {grid.dtype}")
    grid = np.ascontiguousarray(grid, dtype=np.int64)
    _check_values(grid.tobytes(), config.spatial_merge_size)
    return grid


@lru_cache(maxsize=32)
def _check_values(grid_bytes: bytes, merge: int) -> None:
    """Check the values of a grid; those found right are remembered, as calls wait for this."""
    grid = np.frombuffer(grid_bytes, dtype=np.int64).reshape(-1, 3)
    _refuse(grid, (grid < 1).any(axis=1), "t, h and w must be at least 1")
    # In fp64, because the product of absurd sizes overflows int64; exact where it is accepted.
    tokens = grid.astype(np.float64).prod(axis=1).sum()
    if tokens > MAX_TOKENS:
        raise ValueError(
            f"grid_thw holds {tokens:,.0f} patches, more than the {MAX_TOKENS:,} of one call"
        )
    _refuse(
        grid,
        (grid[:, 1:] % merge != 0).any(axis=1),
        f"h and w must be divisible by spatial_merge_size {merge}",
    )


def count_tokens(grid: np.ndarray) -> int:
    """Patches of a checked grid [images, 3]."""
    return int(grid.prod(axis=1).sum())


def count_windows(config: VisionConfig, grid: np.ndarray) -> int:
    """Windows of a checked grid [images, 3]; those cut by the right and bottom edges count too."""
    windows_h_w = -(-grid[:, 1:] // config.window_patches)
    return int((grid[:, 0] * windows_h_w.prod(axis=1)).sum())


def count_frames(grid: np.ndarray) -> int:
    """Frames of a checked grid [images, 3]; an image is one frame."""
    return int(grid[:, 0].sum())


def _refuse(grid: np.ndarray, wrong: np.ndarray, rule: str) -> None:
    """Raise for the first image that is `wrong` [images] bool."""
    if wrong.any():
        image = int(wrong.argmax())
        t, h, w = grid[image].tolist()
        raise ValueError(f"grid_thw of image {image} is (t={t}, h={h}, w={w}), but {rule}")
