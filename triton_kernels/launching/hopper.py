"""When the specialised kernel takes the stream kernel's place, and what follows from that."""

from typing import TYPE_CHECKING

import torch
import triton

from triton_kernels.kernels.softmax import is_online
from triton_kernels.launching.choose import HeadSplit, LaunchSource, head_split, window_limit
from triton_kernels.launching.descriptors import Tile, make_tile
from triton_kernels.launching.table import Launch

if TYPE_CHECKING:
    from triton_kernels.launching.plan import TensorForm

try:
    from triton_kernels.kernels.hopper_stream import specialized_kernel
    from triton_kernels.kernels.hopper_tiles import GROUPS, KEYS, ROWS, STAGES

    LAUNCH = Launch(
        block=(ROWS * GROUPS).value, block_k=KEYS.value, num_warps=4, num_stages=STAGES.value
    )
    _CAN_RUN = not triton.knobs.runtime.interpret  # Gluon has no interpreter
except (ImportError, AttributeError):  # and is experimental: versions to come may have it elsewhere
    specialized_kernel = LAUNCH = None
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


def can_specialize(source: LaunchSource) -> bool:
    """Whether the specialised kernel may be launched on a GPU."""
    gpu = source.gpu
    hopper = gpu is not None and gpu.compute_capability == "9.0"
    return _CAN_RUN and hopper and source.specialized


def is_specialized(
    dtype: torch.dtype,
    head_dim: int,
    max_seqlen: int,
    tokens: int,
    heads: int,
    source: LaunchSource,
) -> bool:
    """Whether the specialised kernel takes the stream kernel's place.

    Where Q and K are rotated beforehand, and all tensors aligned.
    """
    if not can_specialize(source):
        return False
    if max_seqlen < _SHORTEST or is_online(dtype, head_dim, max_seqlen):
        return False
    programs = triton.cdiv(tokens, LAUNCH.block) * heads
    waves = triton.cdiv(programs, _MULTIPROCESSORS)
    tail_in_sectors = head_split(head_dim).tail > 0 and head_dim % 16 == 0
    fullness = _FULL_WITH_TAIL if tail_in_sectors else _FULL_OTHERWISE
    full = programs >= fullness * waves * _MULTIPROCESSORS
    return head_dim > _WIDEST_FOR_STREAM and full


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
    The specialised kernel, which wants both rotated, makes up for it.
    """
    if max_seqlen <= window_limit(dtype, head_dim):
        return "qk"
    if rotary_dim == head_dim or head_dim % 16 > 0:
        return "none"
    return "none" if is_specialized(dtype, head_dim, max_seqlen, tokens, heads, source) else "q"


def head_tiles(
    q: "TensorForm", k: "TensorForm", v: "TensorForm", split: HeadSplit
) -> tuple[Tile, ...]:
    """Main and tail tile of each; where there is no tail the main tile stands in.

    q and k are [tokens, row], as rotate_kernel writes them, v is [tokens, heads, head_dim].
    """
    return tuple(
        make_tile(i, x.dtype, tuple(x.shape), x.strides, [rows, *[1] * (len(x.shape) - 2), columns])
        for i, (x, rows) in enumerate([(q, ROWS.value), (k, LAUNCH.block_k), (v, LAUNCH.block_k)])
        for columns in (split.main, split.tail or split.main)
    )
