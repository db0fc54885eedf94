"""Padded sizes: a compiled tower serves every mix of images that fits its bucket.

The sizes of a bucket are functions of its tokens wherever the images allow it, so that the number
of compilations is the number of token buckets in use, hardly ever more.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from flax_models.common.config import VisionConfig
from flax_models.common.grid import MAX_TOKENS, as_grid, count_frames, count_tokens, count_windows

# Steps that keep padding near a tenth for photographs of any size, in 15 buckets: wide where a call
# takes next to no time, narrow where one image lands. Images of 448, 672, 896 and 1344 px a side
# (1,024, 2,304, 4,096 and 9,216 tokens) and 16 frames of 448 px (8,192) fit without padding. Rungs
# count patches of 14 px; of larger patches they hold as many pixels, so that the same images fit.
_LADDER = (
    *(256, 640, 1024, 1536, 2304, 3072, 4096),
    *(5120, 6144, 7168, 8192, 9216, 12288, 16384, 20480),
)

_LADDER_PATCH = 14

# XLA pads the rows of every product to a multiple of this, and cuts its result.
_ROWS = 8

# Attention within whole frames gets no benefit from a tighter bound below this many tokens.
_FRAME_TOKENS = 1 << 15


@dataclass(frozen=True)
class Bucket:
    """The sizes that a layout is padded to; hashable, so it can be a static argument under jit.

    Attributes:
        tokens: rows of the padded patches.
        windows: segments of `cu_window_seqlens`; those that are not needed are empty.
        frames: segments of `cu_frame_seqlens`; those that are not needed are empty.
        frame_tokens: upper bound on the tokens of one frame.

    Raises:
        ValueError: a size below 1, or more than `grid.MAX_TOKENS` tokens.
    """

    tokens: int
    windows: int
    frames: int
    frame_tokens: int

    def __post_init__(self) -> None:
        """Check the sizes."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"bucket {field.name} must be a positive integer, got {value!r}")
        if self.tokens > MAX_TOKENS:
            raise ValueError(f"bucket tokens {self.tokens:,} pass the {MAX_TOKENS:,} of one call")


def choose_bucket(
    config: VisionConfig, grid_thw: Any, token_buckets: Sequence[int] | None = None
) -> Bucket:
    """Choose the smallest bucket that some images and clips fit in.

    Args:
        config: the tower's configuration.
        grid_thw: [images, 3] integers, as for `plan_layout`.
        token_buckets: the token counts to choose from, each a multiple of the merge unit, and best
            of 8, to which XLA pads in every product. None: a built-in ladder from 256 tokens to the
            most of one call, which pads mixed photographs by about a tenth.

    Raises:
        ValueError: a bad grid (see `grid.as_grid`), bad token buckets (see `check_token_buckets`),
            or none that is large enough.
    """
    grid = as_grid(config, grid_thw)
    buckets = check_token_buckets(config, token_buckets)
    return _choose_bucket(config, grid.tobytes(), buckets)


def check_token_buckets(
    config: VisionConfig, token_buckets: Sequence[int] | None
) -> tuple[int, ...] | None:
    """What a tower is to choose from, found wrong when the tower is made, not at its first call.

    Raises:
        ValueError: no integers, none at all, or one that is no positive multiple of the merge unit.
    """
    if token_buckets is None:
        return None
    try:
        buckets = tuple(map(operator.index, token_buckets))
    except TypeError:
        buckets = ()
    if not buckets or any(size < 1 or size % config.merge_unit for size in buckets):
        raise ValueError(
            f"token_buckets must be positive multiples of the merge unit {config.merge_unit}, "
            f"got {token_buckets!r}"
        )
    return buckets


@lru_cache(maxsize=256)
def _choose_bucket(
    config: VisionConfig, grid_bytes: bytes, token_buckets: tuple[int, ...] | None
) -> Bucket:
    grid = np.frombuffer(grid_bytes, dtype=np.int64).reshape(-1, 3)
    needed = count_tokens(grid)
    if token_buckets is None:
        tokens = fitting_tokens(config, _ladder_tokens(config, needed))
        return bucket_of_tokens(config, grid, tokens)
    tokens = min((size for size in token_buckets if size >= needed), default=None)
    if tokens is None:
        raise ValueError(
            f"grid_thw holds {needed:,} tokens, more than the largest token bucket "
            f"({max(token_buckets):,})"
        )
    return bucket_of_tokens(config, grid, tokens)


def fitting_tokens(config: VisionConfig, tokens: float) -> int:
    """At least so many tokens, of whole merge units, and to whose number XLA need not pad."""
    multiple = math.lcm(config.merge_unit, _ROWS)
    return math.ceil(tokens / multiple) * multiple


def bucket_of_tokens(config: VisionConfig, grid: np.ndarray, tokens: int) -> Bucket:
    """Derive a bucket's other sizes from its tokens, growing them only for unusual images.

    Args:
        config: the tower's configuration.
        grid: [images, 3] int64, checked by `grid.as_grid`.
        tokens: the padded number of tokens.

    Raises:
        ValueError: `tokens` is not a positive multiple of the merge unit, or too small.
    """
    if not isinstance(tokens, int | np.integer) or tokens < 1 or tokens % config.merge_unit:
        raise ValueError(
            f"padded tokens must be a positive multiple of the merge unit {config.merge_unit}, "
            f"got {tokens!r}"
        )
    needed = count_tokens(grid)
    if tokens < needed:
        raise ValueError(f"cannot pad {needed:,} tokens to {tokens:,}")
    # No segment is smaller than a merge unit, so neither count can pass this.
    most = tokens // config.merge_unit
    usual_frames = tokens // 1024 + 8
    # Half as many again as if all were whole, and no more: an empty window costs the kernel what a
    # full one does, but for memory traffic. In a tower without windows every frame is one.
    whole_windows = tokens // config.max_window_seqlen
    usual_windows = max(whole_windows + whole_windows // 2 + 8, usual_frames)
    return Bucket(
        tokens=tokens,
        windows=_roomy(usual_windows, count_windows(config, grid), most),
        frames=_roomy(usual_frames, count_frames(grid), most),
        frame_tokens=_roomy(_FRAME_TOKENS, int(grid[:, 1:].prod(axis=1).max()), tokens),
    )


def exact_bucket(config: VisionConfig, grid: np.ndarray) -> Bucket:
    """The sizes of some images and clips themselves: nothing is padded.

    Args:
        config: the tower's configuration.
        grid: [images, 3] int64, checked by `grid.as_grid`.
    """
    return Bucket(
        tokens=count_tokens(grid),
        windows=count_windows(config, grid),
        frames=count_frames(grid),
        frame_tokens=int(grid[:, 1:].prod(axis=1).max()),
    )


def bucket_of_equal_frames(grid_thw: Any, bucket: Bucket, *, pad_one: bool) -> Bucket:
    """Divide a bucket's tokens into frames of one length, for libraries that take only such.

    Args:
        grid_thw: [images, 3] integers that fit the bucket.
        bucket: as `choose_bucket` returns it.
        pad_one: a frame that is alone may be padded to the bucket.

    Returns:
        The bucket with frames x frame_tokens = tokens.

    Raises:
        ValueError: frames of several lengths, or a bucket that is no whole number of them.
    """
    grid = np.asarray(grid_thw)
    lengths = grid[:, 1] * grid[:, 2]
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest != longest:
        raise ValueError(
            "frame_attention='cudnn' needs frames of one length, got frames of "
            f"{shortest:,} to {longest:,} tokens: use 'fused' for such calls"
        )
    if pad_one and count_frames(grid) == 1:
        longest = bucket.tokens
    if bucket.tokens % longest:
        raise ValueError(
            f"frame_attention='cudnn' needs padding by whole frames of {longest:,} tokens, but "
            f"this call is padded from {count_tokens(grid):,} to {bucket.tokens:,}: choose other "
            "token_buckets, or use 'fused'"
        )
    return replace(bucket, frames=bucket.tokens // longest, frame_tokens=longest)


def frame_length(tokens: int, frames: int) -> int:
    """Tokens of each frame of a layout that `bucket_of_equal_frames` planned.

    Raises:
        ValueError: the tokens are no multiple of the number of frames.
    """
    if tokens % frames:
        raise ValueError(
            "frame_attention='cudnn' needs a layout of frames of one length, got "
            f"{tokens:,} tokens in {frames:,} frames: plan it by `VisionTower.prepare`, or use "
            "'fused'"
        )
    return tokens // frames


def _roomy(usual: int, needed: int, most: int) -> int:
    """Double the usual size until it holds what is needed, but never past the most there can be."""
    while usual < needed:
        usual *= 2
    return min(usual, most)


def _ladder_tokens(config: VisionConfig, needed: int) -> int:
    """The smallest rung that holds `needed` tokens; past the ladder, eight rungs to a doubling."""
    patch = max(config.patch_size, _LADDER_PATCH)
    for rung in _LADDER:
        tokens = -(-rung * _LADDER_PATCH**2 // patch**2)
        if tokens >= needed:
            return tokens
    step = 1 << ((needed - 1).bit_length() - 4)
    return -(-needed // step) * step
