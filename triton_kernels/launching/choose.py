"""Which kernel, with which block sizes, warps and stages, for each case.

Nothing is tuned at call time: `launches.json` says what was fastest, `python -m compare tune`
makes it anew. The warp-specialized kernels, whose tiles are fixed, are in no table.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from triton_kernels.checks import MAX_TILED_HEAD_DIM
from triton_kernels.kernels.softmax import is_online
from triton_kernels.launching.table import Gpu, Launch, Shape, Table, next_power_of_2

try:
    from triton_kernels.kernels.hopper_backward import (
        QUERIES,
        QUERY_STAGES,
        hopper_backward_kv_kernel,
        hopper_backward_q_kernel,
    )
    from triton_kernels.kernels.hopper_stream import hopper_stream_kernel
    from triton_kernels.kernels.hopper_tiles import GROUPS, KEYS, ROWS, STAGES

    HOPPER_LAUNCH = Launch(
        block=(ROWS * GROUPS).value, block_k=KEYS.value, num_warps=4, num_stages=STAGES.value
    )
    # Of the kernel that goes by blocks of keys; of the other as of the forward kernel.
    HOPPER_KEYS_LAUNCH = HOPPER_LAUNCH._replace(
        block=QUERIES.value, block_k=(ROWS * GROUPS).value, num_stages=QUERY_STAGES.value
    )
    HOPPER_ROWS = ROWS.value  # of a block, those of one group of warps
    _CAN_RUN = not triton.knobs.runtime.interpret  # Gluon has no interpreter
except (ImportError, AttributeError):  # and is experimental: versions to come may have it elsewhere
    hopper_stream_kernel = HOPPER_LAUNCH = HOPPER_ROWS = None
    hopper_backward_q_kernel = hopper_backward_kv_kernel = HOPPER_KEYS_LAUNCH = None
    _CAN_RUN = False

# Heads of up to 64 columns want few registers: of the stream kernel four programs run at once.
_WIDEST_FOR_STREAM = 64
# The shortest segments' tokens: in shorter ones what a program does before and after its products
# counts for more.
_SHORTEST = 768
# How far programs have to fill their waves: nothing else runs meanwhile, as a multiprocessor holds
# one program. Of heads with a tail that fill whole sectors, 32 bytes of memory, further, as there
# the stream kernel is at its best. A GPU of compute capability 9.0 mostly has 132 multiprocessors.
_FULL_WITH_TAIL, _FULL_OTHERWISE = 0.75, 0.7
_MULTIPROCESSORS = 132
# Of which dtypes gradients are computed by warp-specialized kernels, too: () for none. fp16 would
# want the largest gradient of each tile, see stream_backward.py.
_BACKWARD_DTYPES = (torch.bfloat16,)
_WIDEST_BACKWARD = 128  # two gradients' sums fill the registers
# How far their programs have to fill their waves: a guess, not measured yet.
_FULL_BACKWARD = 0.6

# What batch-invariant calls look long segments, and rows, up by, whatever they have.
INVARIANT_LENGTH, INVARIANT_ROWS = 4096, 4096 * 16

TABLE_FILE = Path(__file__).with_name("launches.json")
_PACKAGED = Table.read(TABLE_FILE)
_table = ContextVar("table", default=_PACKAGED)
_warp_specialized = ContextVar("warp_specialized", default=True)


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


# Compiled calls trace it, and Dynamo warns of functions that are cached.
def head_split(head_dim: int) -> tuple[int, int]:
    """The narrowest main and tail tile, powers of two, that hold head_dim columns.

    64 = 64 + 0, 80 = 64 + 16: the tail is 0 where none is needed.
    """
    main = max(MIN_COLUMNS, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - main
    return main, max(MIN_COLUMNS, next_power_of_2(rest)) if rest > 0 else 0


def rotated_row(heads: int, head_dim: int, in_chunks: bool = False) -> int:
    """Elements of a token's row of heads that are rotated beforehand.

    All their main tiles, then all their tails; rounded up to 128 bytes of 16-bit elements, so that
    each row starts at a cache line. Of heads in chunks one behind the other, of whole chunks.
    """
    if in_chunks:
        return heads * triton.cdiv(head_dim, WIDEST_CHUNK) * WIDEST_CHUNK
    return -(-heads * sum(head_split(head_dim)) // 64) * 64


def is_wide(head_dim: int) -> bool:
    """Whether a head is read in chunks of columns, unless its launch says that a tile holds it."""
    return head_dim > MAX_TILED_HEAD_DIM


def precision(dtype: torch.dtype, max_seqlen: int) -> str:
    """How wide heads are multiplied, see `tiles.dot`."""
    if dtype != torch.float32:
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
    splits = max(1, min(triton.cdiv(head_dim, columns), splits, most))
    return splits if splits < 8 else splits // 8 * 8


def out_shares(pairs: int, head_dim: int, columns: int, block: int) -> tuple[int, int]:
    """Of those that add up partial logits: how many share the result's columns, and the query rows
    of each.

    Each adds up its rows' logits anew. So rows are few where few pairs have many splits. Columns
    are shared by so many that there are two programs for each multiprocessor.
    """
    rows = min(block, MIN_COLUMNS if pairs < _MANY_SPLITS else 2 * MIN_COLUMNS)
    splits = 2 * _MULTIPROCESSORS // max(pairs * (block // rows), 1)
    return max(1, min(triton.cdiv(head_dim, columns), splits)), rows


def window_limit(dtype: torch.dtype, head_dim: int) -> int:
    """The longest segment that one tile holds; longer ones go to the stream kernel.

    Tiles of 128 rows of 256 columns would not fit the 99 KB of shared memory of compute
    capabilities 8.6, 8.9 and 12.0. Of wide heads it holds the logits alone.
    """
    if is_wide(head_dim):
        return WIDE_LIMIT
    if dtype == torch.float32:
        return 32
    return 64 if sum(head_split(head_dim)) > 192 else 128


def invariant_limit(dtype: torch.dtype, head_dim: int) -> int:
    """The longest segment that the window kernel serves in batch-invariant calls."""
    return min(64, window_limit(dtype, head_dim))


class LaunchSource(NamedTuple):
    """Where a call's launches come from: a table, the GPU to look up in it, and whether
    warp-specialized kernels may take the stream kernels' place.
    """

    table: Table
    gpu: Gpu | None
    warp_specialized: bool


def launch_settings() -> tuple[Table, bool]:
    """The table in use, and whether warp-specialized kernels may be launched."""
    return _table.get(), _warp_specialized.get()


def launch_source(index: int | None) -> LaunchSource:
    """The table in use, for a CUDA device by its index; None is a CPU."""
    return LaunchSource(_table.get(), gpu(index), _warp_specialized.get())


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
def launching_by(table: Table, warp_specialized: bool = True) -> Iterator[None]:
    """Within the context, this thread takes its launches from another table than the package's.

    warp_specialized: whether those kernels, which are in no table, may be launched.
    """
    tokens = _table.set(table), _warp_specialized.set(warp_specialized)
    try:
        yield
    finally:
        _table.reset(tokens[0])
        _warp_specialized.reset(tokens[1])


def can_warp_specialize(source: LaunchSource) -> bool:
    """Whether warp-specialized kernels may be launched on a GPU."""
    hopper = source.gpu is not None and source.gpu.compute_capability == "9.0"
    return _CAN_RUN and hopper and source.warp_specialized


def is_warp_specialized(
    dtype: torch.dtype,
    head_dim: int,
    max_seqlen: int,
    tokens: int,
    heads: int,
    source: LaunchSource,
) -> bool:
    """Whether the warp-specialized kernel takes the stream kernel's place.

    Where Q and K are rotated beforehand, and all tensors aligned.
    """
    if not can_warp_specialize(source):
        return False
    if max_seqlen < _SHORTEST or is_online(dtype, head_dim, max_seqlen):
        return False
    tail_in_sectors = head_split(head_dim)[1] > 0 and head_dim % 16 == 0
    fullness = _FULL_WITH_TAIL if tail_in_sectors else _FULL_OTHERWISE
    return head_dim > _WIDEST_FOR_STREAM and _fills_waves(fullness, tokens, heads)


def has_specialized_gradients(
    dtype: torch.dtype,
    head_dim: int,
    max_seqlen: int,
    tokens: int,
    heads: int,
    source: LaunchSource,
) -> bool:
    """The same of the kernels for gradients, where v and the result's gradient can be described."""
    if not can_warp_specialize(source) or dtype not in _BACKWARD_DTYPES:
        return False
    fits = _WIDEST_FOR_STREAM < head_dim <= _WIDEST_BACKWARD
    return fits and max_seqlen >= _SHORTEST and _fills_waves(_FULL_BACKWARD, tokens, heads)


def _fills_waves(share: float, tokens: int, heads: int) -> bool:
    """Whether programs, of which a multiprocessor holds one, fill such a share of their waves."""
    programs = triton.cdiv(tokens, HOPPER_LAUNCH.block) * heads
    return programs >= share * triton.cdiv(programs, _MULTIPROCESSORS) * _MULTIPROCESSORS


def auto_fuse(
    dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
    max_seqlen: int,
    tokens: int,
    heads: int,
    source: LaunchSource,
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
    shape = dtype, head_dim, max_seqlen, tokens, heads
    return "none" if is_warp_specialized(*shape, source) else "q"
