"""Block sizes, warps and stages for each case: nothing is tuned at call time."""

import functools
from typing import NamedTuple

import torch


class Launch(NamedTuple):
    """How one kernel is launched. Rows of a query tile, rows of a key tile, warps, stages."""

    block: int
    block_k: int
    num_warps: int
    num_stages: int


class HeadSplit(NamedTuple):
    """head_dim cut into a main and a tail tile, both powers of two; tail 0 where none is needed."""

    main: int
    tail: int


# A tensor-core product needs 16 columns.
MIN_COLUMNS = 16


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def head_split(head_dim: int) -> HeadSplit:
    """The narrowest main + tail that hold head_dim columns: 64 = 64 + 0, 80 = 64 + 16."""
    main = max(MIN_COLUMNS, 1 << (head_dim.bit_length() - 1))
    if main >= head_dim:
        return HeadSplit(main, 0)
    return HeadSplit(main, max(MIN_COLUMNS, next_power_of_2(head_dim - main)))


def window_limit(dtype: torch.dtype) -> int:
    """The longest segment that one tile holds; longer ones go to the stream kernel."""
    return 32 if dtype == torch.float32 else 128


@functools.cache
def window_launch(max_seqlen: int) -> Launch:
    """A tile as long as the longest segment."""
    block = max(16, next_power_of_2(max_seqlen))
    return Launch(block, block, num_warps=8 if block > 64 else 4, num_stages=1)


@functools.cache
def stream_launch(head_dim: int, dtype: torch.dtype, aligned: bool) -> Launch:
    """fp32 products run on the plain cores and hold more registers, hence the smaller tiles.

    Tiles of 32 rows also keep unaligned tensors away from the asynchronous tensor-core products:
    ptxas 12.8, which Triton 3.6 brings along, miscompiles two of them that share a staging buffer.
    """
    if dtype == torch.float32 or not aligned:
        return Launch(32, 32, num_warps=4, num_stages=1)
    if head_dim > 128:
        return Launch(128, 32, num_warps=8, num_stages=2)
    if head_dim > 96:
        return Launch(128, 64, num_warps=8, num_stages=2)
    return Launch(64, 64, num_warps=4, num_stages=3)


@functools.cache
def rotate_launch(head_dim: int) -> Launch:
    """block_k counts the heads that share one load of the angles."""
    return Launch(16 if head_dim <= 128 else 8, 2, num_warps=4, num_stages=2)
