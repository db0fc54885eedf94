"""Block sizes, warps and stages for each case, from a checked-in table.

Nothing is tuned at call time: `launches.json` says what was fastest, `python -m compare tune`
makes it anew.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import torch

from triton_kernels.launching.table import Gpu, Launch, Shape, Table, next_power_of_2

TABLE_FILE = Path(__file__).with_name("launches.json")
_PACKAGED = Table.read(TABLE_FILE)
_table = ContextVar("table", default=_PACKAGED)
_specialized = ContextVar("specialized", default=True)


class HeadSplit(NamedTuple):
    """head_dim cut into a main and a tail tile, both powers of two; tail 0 where none is needed."""

    main: int
    tail: int


# A tensor-core product needs 16 columns.
MIN_COLUMNS = 16


@functools.cache
def head_split(head_dim: int) -> HeadSplit:
    """The narrowest main + tail that hold head_dim columns: 64 = 64 + 0, 80 = 64 + 16."""
    main = max(MIN_COLUMNS, 1 << (head_dim.bit_length() - 1))
    if main >= head_dim:
        return HeadSplit(main, 0)
    return HeadSplit(main, max(MIN_COLUMNS, next_power_of_2(head_dim - main)))


def rotated_row(heads: int, head_dim: int) -> int:
    """Elements of a token's row of heads that are rotated beforehand.

    All their main tiles, then all their tails; rounded up to 128 bytes of 16-bit elements, so that
    each row starts at a cache line.
    """
    return -(-heads * sum(head_split(head_dim)) // 64) * 64


def window_limit(dtype: torch.dtype, head_dim: int) -> int:
    """The longest segment that one tile holds; longer ones go to the stream kernel.

    Tiles of 128 rows of 256 columns would not fit the 99 KB of shared memory of compute
    capabilities 8.6, 8.9 and 12.0.
    """
    if dtype == torch.float32:
        return 32
    return 64 if sum(head_split(head_dim)) > 192 else 128


class LaunchSource(NamedTuple):
    """Where a call's launches come from.

    Attributes:
        table, gpu: the table, and the GPU to look up in it.
        specialized: whether the specialised kernel may take the stream kernel's place.
    """

    table: Table
    gpu: Gpu | None
    specialized: bool


def launch_settings() -> tuple[Table, bool]:
    """The table in use, and whether the specialised kernel may be launched."""
    return _table.get(), _specialized.get()


def launch_source(index: int | None) -> LaunchSource:
    """The table in use, for a CUDA device by its index; None is a CPU."""
    table, specialized = launch_settings()
    return LaunchSource(table, gpu(index), specialized)


def find_launch(
    kernel: str,
    dtype: torch.dtype,
    head_dim: int,
    max_seqlen: int,
    rows: int,
    source: LaunchSource,
    aligned: bool = True,
) -> Launch:
    """How to launch a kernel, one of the table's KERNELS, on `rows` = tokens x heads.

    Unaligned tensors have rows of their own in the table, with tiles of 32 rows. Those avoid
    Hopper's asynchronous tensor-core products: ptxas 12.8, which comes with Triton 3.6, miscompiles
    two of them that share a staging buffer.
    """
    operands = "single" if dtype == torch.float32 else "half"
    shape = Shape(kernel, operands if aligned else "unaligned", head_dim, max_seqlen, rows)
    return source.table.find(source.gpu, shape)


@functools.cache
def gpu(index: int | None) -> Gpu | None:
    """A CUDA device as the table names it, by its index; None for a CPU, whose index is None."""
    if index is None:
        return None
    capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
    return Gpu(torch.cuda.get_device_name(index), capability)


@contextlib.contextmanager
def launching_by(table: Table, specialized: bool = True) -> Iterator[None]:
    """Within the context, this thread takes its launches from another table than the package's.

    specialized: whether the specialised kernel, which is in no table, may be launched.
    """
    tokens = _table.set(table), _specialized.set(specialized)
    try:
        yield
    finally:
        _table.reset(tokens[0])
        _specialized.reset(tokens[1])
