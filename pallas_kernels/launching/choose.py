"""Block sizes, warps and stages for each case, from a checked-in table.

Nothing is tuned at call time: `launches.json` says what was fastest, `python -m compare tune`
makes it anew.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.launching.compile import compiler, local_gpu
from pallas_kernels.launching.table import Gpu, Launch, Shape, Table, next_power_of_2

TABLE_FILE = Path(__file__).with_name("launches.json")
_PACKAGED = Table.read(TABLE_FILE)
# JAX traces anew for others.
_table = jax.make_user_context(_PACKAGED)
_specialized = jax.make_user_context(True)


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


def window_limit(dtype: DTypeLike, head_dim: int) -> int:
    """The longest segment that one tile holds; longer ones go to the stream kernel.

    Tiles of 128 rows of 256 columns would not fit the 99 KB of shared memory of compute
    capabilities 8.6, 8.9 and 12.0.
    """
    if dtype == jnp.float32:
        return 32
    return 64 if sum(head_split(head_dim)) > 192 else 128


def find_launch(kernel: str, dtype: DTypeLike, head_dim: int, max_seqlen: int, rows: int) -> Launch:
    """How to launch a kernel, one of the table's KERNELS, on `rows` = tokens x heads."""
    operands = "single" if dtype == jnp.float32 else "half"
    shape = Shape(kernel, operands, head_dim, max_seqlen, rows)
    return _table.value.find(gpu(), shape)


def gpu() -> Gpu | None:
    """The first GPU here, as the table names it; None where there is none.

    What is fastest depends on who compiles: a GPU whose kernels XLA compiles has another name.
    """
    first = local_gpu()
    if first is None:
        return None
    suffix = " by XLA" if compiler() == "xla" else ""
    return Gpu(first.device_kind + suffix, first.compute_capability + suffix)


def may_specialize() -> bool:
    """Whether the specialised kernel may take the stream kernel's place."""
    return _specialized.value


@contextlib.contextmanager
def launching_by(table: Table, specialized: bool = True) -> Iterator[None]:
    """Within the context, this thread takes its launches from another table than the package's.

    specialized: whether the specialised kernel, which is in no table, may be launched.
    """
    with _table(table), _specialized(specialized):
        yield
