"""When the specialised kernel takes the stream kernel's place, and what follows from that."""

from typing import TYPE_CHECKING

import torch
import triton

from triton_kernels.descriptors import Tile, make_tile
from triton_kernels.launch import HeadSplit, LaunchSource, head_split, window_limit
from triton_kernels.launch_table import Launch
from triton_kernels.softmax import is_online

if TYPE_CHECKING:
    from triton_kernels.calls import TensorForm

try:
    from triton_kernels.specialized_kernel import GROUPS, KEYS, ROWS, STAGES, specialized_kernel

    LAUNCH = Launch(
        block=(ROWS * GROUPS).value, block_k=KEYS.value, num_warps=4, num_stages=STAGES.value
    )
    _CAN_RUN = not triton.knobs.runtime.interpret  # Gluon has no interpreter
except (ImportError, AttributeError):  # and is experimental: versions to come may have it elsewhere
    specialized_kernel = LAUNCH = None
    _CAN_RUN = False

# Heads of up to 64 columns want few registers: of the stream kernel four programs run at once.
_WIDEST_FOR_STREAM = 64
# The shortest segments' tokens, and how far programs have to fill their waves. In shorter segments
# what a program does before and after its products counts for more, most where there is no tail,
# and so groups do not take turns. Nothing else runs meanwhile, as a multiprocessor holds one
# program: so waves are to be full. A GPU of compute capability 9.0 mostly has 132 multiprocessors.
_WITH_TAIL, _WITHOUT_TAIL = (1024, 0.75), (2048, 0.8)
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
    shortest, fullness = _WITH_TAIL if head_split(head_dim).tail else _WITHOUT_TAIL
    if max_seqlen < shortest or is_online(dtype, head_dim, max_seqlen):
        return False
    programs = triton.cdiv(tokens, LAUNCH.block) * heads
    waves = triton.cdiv(programs, _MULTIPROCESSORS)
    return head_dim > _WIDEST_FOR_STREAM and programs >= fullness * waves * _MULTIPROCESSORS


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
