"""What is launched for a call, from the form of its tensors.

Remembered by form: working it out again would cost each call microseconds.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction

from triton_kernels.kernels.rotate import rotate_kernel
from triton_kernels.kernels.softmax import is_online
from triton_kernels.kernels.stream import stream_kernel
from triton_kernels.kernels.window import window_kernel
from triton_kernels.launching.choose import (
    LaunchSource,
    find_launch,
    head_split,
    rotated_row,
    window_limit,
)
from triton_kernels.launching.descriptors import can_describe
from triton_kernels.launching.hopper import (
    LAUNCH,
    can_specialize,
    head_tiles,
    is_specialized,
    specialized_kernel,
)
from triton_kernels.launching.launch import Call, binary_of
from triton_kernels.launching.table import Launch

LOG2_E = 1.4426950408889634

remembered = functools.lru_cache(4096)


# What a call looks at of each plain tensor: dtype, device, shape and strides.
Form = tuple[tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]], ...]


def form_of(tensors: tuple[torch.Tensor, ...]) -> Form:
    """The form of plain tensors, by which a call like an earlier one is recognised."""
    return tuple([(x.dtype, x.device, x.shape, x.stride()) for x in tensors])


class TensorForm(NamedTuple):
    """One tensor of a `Form`."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    strides: tuple[int, ...]


def are_aligned(*tensors: torch.Tensor) -> bool:
    """Whether all begin at a multiple of 16 bytes, which a form does not say."""
    bits = 0
    for x in tensors:
        bits |= x.data_ptr()
    return bits % 16 == 0


class Rotation(NamedTuple):
    """A rotation beforehand.

    Attributes:
        call: the launch, on the tensor that is rotated, what it writes, cos and sin.
        first: the place in (q, k) of what is rotated, or of the first of both.
        shape: of what it writes, [tokens, parts, row], parts being one of Q and K, or both.
    """

    call: Call
    first: int
    shape: tuple[int, int, int]


class Plan(NamedTuple):
    """All launches of the operation.

    Attributes:
        rotations: of Q and K at once, of each, of K alone, or none.
        attention: what reads their results, on (q, k, v, out, cos, sin, cu_seqlens) or, if it has
            tiles, which are of (q, k, v), on (out, cu_seqlens).
    """

    rotations: tuple[Rotation, ...]
    attention: Call


@remembered
def plan(
    form: Form,
    at_16: bool,
    source: LaunchSource,
    max_seqlen: int,
    scale: float,
    fuse: str,
    at_once: bool,
) -> Plan:
    """What is launched for a form of (q, k, v, cos, sin, cu_seqlens), or (qkv, cos, ...).

    Args:
        form: the tensors' as they are passed.
        at_16: they are aligned, see are_aligned.
        source, max_seqlen, scale: of the call.
        fuse: "qk", "q" or "none".
        at_once: rotate Q and K in one launch, as K's heads lie behind Q's.
    """
    *qkv, cos, sin, cu_seqlens = (TensorForm(*x) for x in form)
    q, k, v = qkv if len(qkv) == 3 else [_part(qkv[0])] * 3
    rotations = []

    def rotated(x: TensorForm, first: int, parts: int) -> TensorForm:
        rotations.append(_rotation(x, cos, at_16, source, first, parts))
        tokens, _, row = rotations[-1].shape
        return x._replace(shape=torch.Size((tokens, row)), strides=(parts * row, 1))

    if at_once:
        q = k = rotated(q, 0, 2)
    else:
        if fuse == "none":
            q = rotated(q, 0, 1)
        if fuse != "qk":
            k = rotated(k, 1, 1)
    read = q, k, v, cos, sin, cu_seqlens
    return Plan(tuple(rotations), attention_call(read, at_16, source, max_seqlen, scale, fuse))


def _part(qkv: TensorForm) -> TensorForm:
    """Q, K or V of a packed tensor, which lie alike."""
    (tokens, _, *head), (token_stride, _, *strides) = qkv.shape, qkv.strides
    return qkv._replace(shape=torch.Size((tokens, *head)), strides=(token_stride, *strides))


def _rotation(
    x: TensorForm, cos: TensorForm, at_16: bool, source: LaunchSource, first: int, parts: int
) -> Rotation:
    """Rotation beforehand of so many of Q and K, of which x is the first."""
    tokens, heads, head_dim = x.shape
    row = rotated_row(heads, head_dim)
    rows = [*x.strides[:2], parts * row, row]
    aligned, angle_unit, strides = in_units(rows, cos, at_16)
    launch = find_launch("rotate", x.dtype, head_dim, 1, tokens * heads, source, aligned)
    programs = triton.cdiv(tokens, launch.block) * parts * triton.cdiv(heads, launch.block_k)
    split = head_split(head_dim)
    constants = (
        heads, head_dim, 2 * cos.shape[1], split.main, split.tail, aligned, angle_unit, parts,
        launch.block, launch.block_k, can_specialize(source),
    )  # fmt: skip
    numbers = tokens, *strides
    call = make_call(rotate_kernel, programs, launch, numbers, constants, x, aligned)
    return Rotation(call, first, (tokens, parts, row))


def attention_call(
    read: tuple[TensorForm, ...],
    at_16: bool,
    source: LaunchSource,
    max_seqlen: int,
    scale: float,
    fuse: str,
) -> Call:
    """Attention that reads (q, k, v, cos, sin, cu_seqlens).

    at_16: their addresses are aligned. fuse: "qk", or what is rotated already, K ("q") or both,
    which are [tokens, row].
    """
    *qkv, cos, _, cu_seqlens = read
    x = qkv[-1]
    tokens, heads, head_dim = x.shape
    rows = [stride for x in qkv for stride in _row_strides(x)]
    aligned, angle_unit, strides = in_units(rows, cos, at_16)
    segments = cu_seqlens.shape[0] - 1
    shape = x.dtype, head_dim, max_seqlen, tokens * heads
    split = head_split(head_dim)
    if (
        fuse == "none"
        and aligned
        and can_describe(x.strides[:2])
        and is_specialized(x.dtype, head_dim, max_seqlen, tokens, heads, source)
    ):
        numbers = tokens, segments, min(max_seqlen, tokens), scale * LOG2_E
        constants = heads, head_dim, *split
        programs = triton.cdiv(tokens, LAUNCH.block) * heads
        call = make_call(specialized_kernel, programs, LAUNCH, numbers, constants, x, aligned)
        # It finds its segments while the rotation ends. Of the stream kernel several programs share
        # a multiprocessor: they would be dealt out unevenly.
        return call._replace(tiles=head_tiles(*qkv, split), overlap=True)
    if aligned and max_seqlen <= window_limit(x.dtype, head_dim):
        launch = find_launch("window", *shape, source)
        kernel, programs, blocks = window_kernel, segments * heads, (launch.block,)
    else:
        name = "rotating_stream" if fuse == "qk" else "stream"
        launch = find_launch(name, *shape, source, aligned)
        programs = triton.cdiv(tokens, launch.block) * heads
        online = is_online(x.dtype, head_dim, max_seqlen)
        kernel, blocks = stream_kernel, (online, launch.block, launch.block_k)
    numbers = tokens, segments, scale * LOG2_E, *strides
    constants = (
        heads, head_dim, 2 * cos.shape[1], split.main, split.tail, aligned, angle_unit,
        fuse != "none", fuse == "qk", *blocks,
    )  # fmt: skip
    return make_call(kernel, programs, launch, numbers, constants, x, aligned)


def _row_strides(x: TensorForm) -> tuple[int, int]:
    """Token and head stride; 0 for the heads of a rotated row, which have places of their own."""
    return x.strides[0], x.strides[1] if len(x.shape) == 3 else 0


def in_units(rows: list[int], cos: TensorForm, at_16: bool) -> tuple[bool, int, tuple[int, ...]]:
    """Strides in the kernels' units.

    Args:
        rows: token and head strides, in elements.
        cos: the angles; sin lies alike.
        at_16: all addresses are aligned.

    Returns:
        Whether rows are aligned to 16 bytes, so that their strides count 8 elements; how many
        elements the angles' stride counts; and the strides in these units, the angles' last.
    """
    angle_stride = cos.strides[0]
    if not at_16 or any(stride % 8 for stride in rows):
        return False, 1, (*rows, angle_stride)
    unit = math.gcd(angle_stride, 4)
    return True, unit, (*[stride // 8 for stride in rows], angle_stride // unit)


def make_call(
    kernel: JITFunction,
    programs: int,
    launch: Launch,
    numbers: tuple[int | float, ...],
    constants: tuple[int | bool, ...],
    x: TensorForm,
    aligned: bool,
) -> Call:
    """A launch, of which x is one tensor; the dtypes of the others are to follow from its.

    aligned: all tensors' rows are, see in_units.
    """
    # A larger number is 64 bits wide to Triton, for which it compiles anew.
    known = aligned and max(numbers) < 2**31
    binary = binary_of(kernel, x.dtype, x.device, constants, launch) if known else None
    return Call(kernel, programs, launch, numbers, constants, x.device.index, binary)
