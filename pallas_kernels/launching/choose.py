"""Which kernel, with which block sizes, warps and stages, for each case.

Nothing is tuned at call time: `launches.json` says what was fastest, `python -m compare tune`
makes it anew. The warp-specialized kernels, whose tiles are fixed, are in no table.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.checks import MAX_TILED_HEAD_DIM
from pallas_kernels.kernels.dialect import HAVE_TRITON
from pallas_kernels.kernels.softmax import is_online
from pallas_kernels.launching.compile import HAVE_MOSAIC, compiler
from pallas_kernels.launching.devices import local_gpu, local_gpus
from pallas_kernels.launching.table import Gpu, Launch, Shape, Table, next_power_of_2

# Of the warp-specialized kernel: a program's tokens, and by how many rows and columns its copies
# start.
BLOCK = 128
ROW_UNIT, COLUMN_UNIT = 8, 16

# Heads of up to 64 columns want few registers: of the stream kernel four programs run at once.
_WIDEST_FOR_STREAM = 64
# The shortest segments' tokens: in shorter ones what a program does before and after its products
# counts for more.
_SHORTEST = 768
# The same where tokens are not by eights, and V is copied to rows that are.
_SHORTEST_COPIED = 3072
# How far programs have to fill their waves: nothing else runs meanwhile, as a multiprocessor holds
# one program. Of heads with a tail that fill whole sectors, 32 bytes of memory, further, as there
# the stream kernel is at its best. A GPU of compute capability 9.0 mostly has 132 multiprocessors.
_FULL_WITH_TAIL, _FULL_OTHERWISE = 0.75, 0.7
_MULTIPROCESSORS = 132

# Of which dtypes gradients are computed by warp-specialized kernels, too: () for none. fp16 would
# want the largest gradient of each tile, see stream_backward.py.
_BACKWARD_DTYPES = (jnp.bfloat16,)
_WIDEST_BACKWARD = 128  # two gradients' sums fill the registers
# How far their programs have to fill their waves: a guess, not measured yet.
_FULL_BACKWARD = 0.6

# What batch-invariant calls look long segments, and rows, up by, whatever they have.
INVARIANT_LENGTH, INVARIANT_ROWS = 4096, 4096 * 16

TABLE_FILE = Path(__file__).with_name("launches.json")
# JAX traces anew for others.
_table = jax.make_user_context(Table.read(TABLE_FILE))
_warp_specialized = jax.make_user_context(True)


# Of wide heads: the longest segment whose logits one tile holds, and what every chunk's columns
# divide.
WIDE_LIMIT, WIDEST_CHUNK = 64, 128
# How these are multiplied in fp32, see `tiles.dot`: in segments of up to 16 tokens, which fill no
# tensor core, and in longer ones.
SHORT_FP32, WIDE_FP32 = "ieee", "tf32x3"
# The most programs that share the columns of one; of segments of up to 32 tokens twice as many.
_MOST_SPLITS = 64
# Above so many, more partial logits cost what more programs gain.
_MANY_SPLITS = 16
# A tensor-core product needs 16 columns.
MIN_COLUMNS = 16


@functools.cache
def head_split(head_dim: int) -> tuple[int, int]:
    """The narrowest main and tail tile, powers of two, that hold head_dim columns.

    64 = 64 + 0, 80 = 64 + 16: the tail is 0 where none is needed.
    """
    main = max(MIN_COLUMNS, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - main
    return main, max(MIN_COLUMNS, next_power_of_2(rest)) if rest > 0 else 0


def is_wide(head_dim: int) -> bool:
    """Whether a head is read in chunks of columns, unless its launch says that a tile holds it."""
    return head_dim > MAX_TILED_HEAD_DIM


def precision(dtype: DTypeLike, max_seqlen: int) -> str:
    """How wide heads are multiplied, see `tiles.dot`."""
    if dtype != jnp.float32:
        return "ieee"
    return SHORT_FP32 if max_seqlen <= 16 else WIDE_FP32


def column_splits(pairs: int, head_dim: int, columns: int, block: int) -> int:
    """Programs that share the columns of one of so many (segment, head) pairs of wide heads.

    So many that there are two for each multiprocessor; where that is many, only one, as partial
    logits are to be added up. By eights, as so many of these are loaded at once.
    """
    splits = 2 * _MULTIPROCESSORS // max(pairs, 1)
    if splits > _MANY_SPLITS:
        splits = max(_MANY_SPLITS, _MULTIPROCESSORS // max(pairs, 1))
    most = _MOST_SPLITS if block > 32 else 2 * _MOST_SPLITS
    splits = max(1, min(pl.cdiv(head_dim, columns), splits, most))
    return splits if splits < 8 else splits // 8 * 8


def out_shares(pairs: int, head_dim: int, columns: int, block: int) -> tuple[int, int]:
    """Of those that add up partial logits: how many share the result's columns, and the query rows
    of each.

    Each adds up its rows' logits anew. So rows are few where few pairs have many splits. Columns
    are shared by so many that there are two programs for each multiprocessor.
    """
    rows = min(block, MIN_COLUMNS if pairs < _MANY_SPLITS else 2 * MIN_COLUMNS)
    splits = 2 * _MULTIPROCESSORS // max(pairs * (block // rows), 1)
    return max(1, min(pl.cdiv(head_dim, columns), splits)), rows


def rotated_row(heads: int, head_dim: int, in_chunks: bool = False) -> int:
    """Elements of a token's row of heads that are rotated beforehand.

    All their main tiles, then all their tails; rounded up to 128 bytes of 16-bit elements, so that
    each row starts at a cache line. Of heads in chunks one behind the other, of whole chunks.
    """
    if in_chunks:
        return heads * pl.cdiv(head_dim, WIDEST_CHUNK) * WIDEST_CHUNK
    return -(-heads * sum(head_split(head_dim)) // 64) * 64


def window_limit(dtype: DTypeLike, head_dim: int) -> int:
    """The longest segment that one tile holds; longer ones go to the stream kernel.

    Tiles of 128 rows of 256 columns would not fit the 99 KB of shared memory of compute
    capabilities 8.6, 8.9 and 12.0. Of wide heads it holds the logits alone.
    """
    if is_wide(head_dim):
        return WIDE_LIMIT
    if dtype == jnp.float32:
        return 32
    return 64 if sum(head_split(head_dim)) > 192 else 128


def invariant_limit(dtype: DTypeLike, head_dim: int) -> int:
    """The longest segment that the window kernel serves in batch-invariant calls."""
    return min(64, window_limit(dtype, head_dim))


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


@contextlib.contextmanager
def launching_by(table: Table, warp_specialized: bool = True) -> Iterator[None]:
    """Within the context, this thread takes its launches from another table than the package's.

    warp_specialized: whether the warp-specialized kernel, which is in no table, may be launched.
    """
    with _table(table), _warp_specialized(warp_specialized):
        yield


def can_warp_specialize() -> bool:
    """Whether the warp-specialized kernel may be launched on the GPUs here."""
    # One program is for all of them.
    capabilities = {gpu.compute_capability for gpu in local_gpus()}
    return HAVE_MOSAIC and capabilities == {"9.0"} and _warp_specialized.value


def is_warp_specialized(
    dtype: DTypeLike, head_dim: int, max_seqlen: int, tokens: int, heads: int
) -> bool:
    """Whether the warp-specialized kernel takes the stream kernel's place.

    Where Q and K are rotated beforehand.
    """
    if not can_warp_specialize():
        return False
    shortest = _SHORTEST if rows_of(tokens) == tokens else _SHORTEST_COPIED
    if max_seqlen < shortest or is_online(dtype, head_dim, max_seqlen):
        return False
    tail_in_sectors = head_split(head_dim)[1] > 0 and head_dim % 16 == 0
    fullness = _FULL_WITH_TAIL if tail_in_sectors else _FULL_OTHERWISE
    full = _fills_waves(fullness, tokens, heads)
    return head_dim > _WIDEST_FOR_STREAM and full and tiles_fit(tokens, heads, head_dim)


def has_specialized_gradients(
    dtype: DTypeLike, head_dim: int, max_seqlen: int, tokens: int, heads: int
) -> bool:
    """The same of the kernels for gradients. Tokens that are not by eights are copied there, too,
    which counts for less.
    """
    if not can_warp_specialize() or dtype not in _BACKWARD_DTYPES:
        return False
    fits = _WIDEST_FOR_STREAM < head_dim <= _WIDEST_BACKWARD and tokens >= BLOCK
    return fits and max_seqlen >= _SHORTEST and _fills_waves(_FULL_BACKWARD, tokens, heads)


def _fills_waves(share: float, tokens: int, heads: int) -> bool:
    """Whether programs, of which a multiprocessor holds one, fill such a share of their waves."""
    programs = pl.cdiv(tokens, BLOCK) * heads
    return programs >= share * pl.cdiv(programs, _MULTIPROCESSORS) * _MULTIPROCESSORS


def has_kernel(
    dtype: DTypeLike,
    head_dim: int,
    max_seqlen: int,
    tokens: int,
    heads: int,
    k_heads: int,
    fuse: str,
    batch_invariant: bool,
) -> bool:
    """Whether a kernel serves a call: any that Pallas' Triton dialect or Mosaic is there for."""
    shape = dtype, head_dim, max_seqlen, tokens, heads
    may_be = fuse == "none" and not batch_invariant
    fits = may_be and is_warp_specialized(*shape) and tiles_fit(tokens, k_heads, head_dim)
    return HAVE_TRITON or fits


def auto_fuse(
    dtype: DTypeLike, head_dim: int, rotary_dim: int, max_seqlen: int, tokens: int, heads: int
) -> str:
    """What fuse="auto" means: "qk" where one tile holds a segment, else "none" or "q".

    "q" is for heads of which only a part rotates, as a pass over Q would mostly copy. Heads of no
    multiple of 16 dims fill no whole sectors, 32 bytes of memory, before that pass: there it pays.
    The warp-specialized kernel, which wants both rotated, makes up for it.
    """
    if max_seqlen <= window_limit(dtype, head_dim):
        return "qk"
    if rotary_dim == head_dim or head_dim % 16 > 0:
        return "none"
    return "none" if is_warp_specialized(dtype, head_dim, max_seqlen, tokens, heads) else "q"


def tiles_fit(tokens: int, heads: int, head_dim: int) -> bool:
    """Whether the warp-specialized kernel's tiles fit the arrays, of 72 to 128 columns a head.

    Where a head's tile of V is wider than the head, in odd numbers it would pass the last one's.
    """
    pairs = head_dim % COLUMN_UNIT == 0 or heads % 2 == 0
    return pairs and 64 < head_dim <= 128 and tokens >= BLOCK


def rows_of(tokens: int) -> int:
    """Rows of the arrays that it copies tiles from: by eights, the last of no token."""
    return pl.cdiv(tokens, ROW_UNIT) * ROW_UNIT
