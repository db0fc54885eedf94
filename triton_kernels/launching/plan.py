"""All launches of a call: worked out from the form of its tensors, and made on those tensors.

First rotations, if any, then attention.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction

from triton_kernels.checks import Norms
from triton_kernels.kernels.rotate import rotate_kernel
from triton_kernels.kernels.softmax import is_online
from triton_kernels.kernels.stream import stream_kernel
from triton_kernels.kernels.wide import wide_kernel
from triton_kernels.kernels.window import window_kernel
from triton_kernels.launching.choose import (
    HOPPER_LAUNCH,
    HOPPER_ROWS,
    INVARIANT_LENGTH,
    INVARIANT_ROWS,
    LaunchSource,
    can_warp_specialize,
    column_splits,
    find_launch,
    head_split,
    hopper_stream_kernel,
    invariant_limit,
    is_warp_specialized,
    is_wide,
    out_shares,
    precision,
    rotated_row,
    window_limit,
)
from triton_kernels.launching.descriptors import Tile, can_describe, make_tile
from triton_kernels.launching.launch import Call, binary_of, launch_kernel
from triton_kernels.launching.table import Launch

LOG2_E = 1.4426950408889634

# What a call looks at of each plain tensor: dtype, device, shape and strides.
Form = tuple[tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]], ...]


class TensorForm(NamedTuple):
    """One tensor of a `Form`."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    strides: tuple[int, ...]


class Rotation(NamedTuple):
    """A rotation beforehand."""

    call: Call  # on the tensor that is rotated, what it writes, cos, sin, its or both parts' norms
    first: int  # the place in (q, k) of what is rotated, or of the first of both
    shape: tuple[int, int, int]  # of what it writes, [tokens, one of Q and K or both, row]


class Partials(NamedTuple):
    """Logits by so many of a wide head's columns, which attention adds up."""

    call: Call  # on what attention is on, before it
    shape: tuple[int, ...]  # of what it writes, in fp32, and attention reads


class Plan(NamedTuple):
    """All launches of the operation."""

    part: int  # bytes from Q to K and from K to V in a packed tensor; 0 if they are separate
    shape: tuple[int, int, int]  # of the result, [tokens, heads, head_dim], as strides
    strides: tuple[int, int, int]
    rotations: tuple[Rotation, ...]  # of Q and K at once, of each, of K alone, or none
    # What reads their results, on (q, k, v, out, cos, sin, cu_seqlens, lse) and the norms of what
    # is not rotated before or, if it has tiles, which are of (q, k, v), on (out, cu_seqlens, lse).
    attention: Call
    # What is launched behind it on the same result: of the segments that it leaves out.
    behind: "Plan | None" = None
    # Of wide heads, where programs share them. What it writes takes the place of lse.
    partials: Partials | None = None


# What is added to the mean squares of Q's and of K's heads, None where they are not normalised.
Eps = tuple[float | None, float | None]


class Serving(NamedTuple):
    """Which segments a plan is for, and what its launches are looked up by."""

    max_seqlen: int
    rows: int | None = None  # tokens x heads; None: the call's
    shortest: int = 0  # of the stream kernel: shorter segments are another plan's
    shared: bool = False  # of the window kernel: longer segments, and padding, are another plan's
    keeps_lse: bool = False  # log-sum-exps are written, for a backward pass
    embed: str = "rope"  # one of EMBEDDINGS


def make_plan(
    form: Form,
    at_16: bool,
    is_behind: bool,
    source: LaunchSource,
    max_seqlen: int,
    scale: float,
    fuse: str,
    batch_invariant: bool = False,
    keeps_lse: bool = False,
    norms: Norms | None = None,
    embed: str = "rope",
) -> Plan:
    """What is launched for a form of (q, k, v, cos, sin, cu_seqlens), or (qkv, cos, ...).

    Where it is batch-invariant a segment's own length alone says what serves it: short ones, and
    the others, go to a kernel each, by launches that no size decides.

    at_16: all of them but cu_seqlens begin at a multiple of 16 bytes. is_behind: K's heads lie
    behind Q's, so that one launch can rotate both. fuse: "qk", "q" or "none"; or "auto", if it is
    batch-invariant.
    """
    eps = (None, None)
    if norms is not None:
        eps = tuple(None if weight is None else norms.eps for weight in norms[:2])
    if not batch_invariant:
        serving = Serving(max_seqlen, keeps_lse=keeps_lse, embed=embed)
        return _plan(form, at_16, is_behind, source, serving, scale, fuse, eps)
    *qkv, cos, _, _ = (TensorForm(*x) for x in form)
    limit = invariant_limit(qkv[0].dtype, qkv[0].shape[-1])
    rows = [n for x in qkv for n in (x.strides[0], x.strides[-2])]
    aligned, *_ = in_units(rows, cos, at_16)
    source = source._replace(warp_specialized=False)  # which is for calls that fill a GPU

    def plan(serving: Serving, auto: str) -> Plan:
        meant = auto if fuse == "auto" else fuse
        serving = serving._replace(keeps_lse=keeps_lse, embed=embed)
        return _plan(form, at_16, is_behind, source, serving, scale, meant, eps)

    # The window kernel takes no others; of wide heads the programs that share one depend on sizes.
    if not aligned or is_wide(qkv[0].shape[-1]):
        return plan(Serving(INVARIANT_LENGTH, INVARIANT_ROWS), "none")
    short = plan(Serving(limit, INVARIANT_ROWS, shared=max_seqlen > limit), "qk")
    if max_seqlen <= limit:
        return short
    others = plan(Serving(INVARIANT_LENGTH, INVARIANT_ROWS, shortest=limit + 1), "none")
    # Behind them, as the stream kernel puts what it rotates into all rows of the result.
    return others._replace(behind=short)


def _plan(
    form: Form,
    at_16: bool,
    is_behind: bool,
    source: LaunchSource,
    serving: Serving,
    scale: float,
    fuse: str,
    eps: Eps,
) -> Plan:
    """What is launched of one attention kernel; fuse is not "auto"."""
    *qkv, cos, sin, cu_seqlens = (TensorForm(*x) for x in form)
    packed = len(qkv) == 1
    part = qkv[0].strides[1] * qkv[0].dtype.itemsize if packed else 0
    q, k, v = [part_of(qkv[0])] * 3 if packed else qkv
    tokens, heads, head_dim = q.shape
    if fuse == "qk" and eps[1] is not None and not _fits_tile((q, k, v), cos, at_16, serving):
        fuse = "q"  # the stream kernel would normalise every key for every block of queries
    q, k, rotations = rotate_first(q, k, cos, at_16, is_behind, source, serving, fuse, eps)
    read = q, k, v, cos, sin, cu_seqlens
    shape, strides = (tokens, heads, head_dim), (heads * head_dim, head_dim, 1)
    if is_wide(head_dim) and _fits_tile((q, k, v), cos, at_16, serving):
        partials, attention = _wide_attention(read, heads, source, serving, scale, fuse)
        return Plan(part, shape, strides, rotations, attention, partials=partials)
    attention = _attention(read, heads, at_16, source, serving, scale, fuse, eps)
    return Plan(part, shape, strides, rotations, attention)


def rotate_first(
    q: TensorForm,
    k: TensorForm,
    cos: TensorForm,
    at_16: bool,
    is_behind: bool,
    source: LaunchSource,
    serving: Serving,
    fuse: str,
    eps: Eps = (None, None),
) -> tuple[TensorForm, TensorForm, tuple[Rotation, ...]]:
    """What is rotated beforehand, and the forms of Q and K behind it."""
    rotations = []

    def rotated(x: TensorForm, first: int, parts: int) -> TensorForm:
        rotations.append(_rotation(x, cos, at_16, source, serving, first, parts, eps[first]))
        tokens, _, row = rotations[-1].shape
        if is_wide(x.shape[-1]):
            return x._replace(strides=(parts * row, row // x.shape[1], 1))
        return x._replace(shape=torch.Size((tokens, row)), strides=(parts * row, 1))

    if fuse == "none" and is_behind and q.shape == k.shape and eps[0] == eps[1]:
        q = k = rotated(q, 0, 2)
    else:
        if fuse == "none":
            q = rotated(q, 0, 1)
        if fuse != "qk":
            k = rotated(k, 1, 1)
    return q, k, tuple(rotations)


def launch_plan(
    plan: Plan,
    tensors: Sequence[torch.Tensor],
    addresses: Sequence[int],
    norms: Norms | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch all of a plan, on the current stream of the tensors' device; returns the result.

    Args:
        plan: what is launched.
        tensors, addresses: of (q, k, v, cos, sin, cu_seqlens), or (qkv, cos, ...), as in its form.
        norms: those of the heads, if it is of any.
        out: the result, if there is one already.
        lse: log-sum-exp of each row [heads, tokens], in powers of two, if the plan keeps them.
    """
    part, shape, strides, rotations, attention, behind, partials = plan
    # Triton launches on the current device, which need not be the tensors'.
    if attention.device is not None and attention.device != torch.cuda.current_device():
        with torch.cuda.device(attention.device):
            return launch_plan(plan, tensors, addresses, norms, out, lse)
    x = tensors[0]
    held = [*tensors]  # until all is launched
    weights = [None, None]
    if norms is not None:
        held += norms.given
        weights = [None if weight is None else weight.data_ptr() for weight in norms[:2]]
    *qkv, cos, sin, cu_seqlens = addresses
    if part:
        qkv = [qkv[0], qkv[0] + part, qkv[0] + 2 * part]
    if rotations:
        launch_rotations(rotations, x, held, qkv, (cos, sin), weights)
    if out is None:
        out = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    held.append(out)
    kept = None
    if lse is not None:
        kept = lse.data_ptr()
        held.append(lse)
    if partials is not None:
        held.append(torch.empty(partials.shape, dtype=torch.float32, device=x.device))
        kept = held[-1].data_ptr()
        written = *qkv, out.data_ptr(), cos, sin, cu_seqlens, kept, *weights
        launch_kernel(partials.call, held, written)
    if attention.tiles:
        launch_kernel(attention, held, (out.data_ptr(), cu_seqlens, kept), qkv)
    else:
        launch_kernel(attention, held, (*qkv, out.data_ptr(), cos, sin, cu_seqlens, kept, *weights))
    return out if behind is None else launch_plan(behind, tensors, addresses, norms, out, lse)


def launch_rotations(
    rotations: Sequence[Rotation],
    x: torch.Tensor,
    held: list[torch.Tensor],
    qkv: list[int],
    angles: tuple[int, int],
    weights: list[int | None],
) -> None:
    """Launch them on q, k and v at these addresses, of which those rotated become their results'.

    weights: addresses of Q's and K's norms, of which those that are done with become None. held, to
    which results are added: what the addresses are of, all of x's dtype and device.
    """
    for call, first, written in rotations:
        rotated = torch.empty(written, dtype=x.dtype, device=x.device)
        held.append(rotated)
        address = rotated.data_ptr()
        second = weights[1] if written[1] == 2 else None
        launch_kernel(call, held, (qkv[first], address, *angles, weights[first], second))
        for i in range(written[1]):
            qkv[first + i] = address + i * written[2] * x.itemsize
            weights[first + i] = None


def part_of(qkv: TensorForm) -> TensorForm:
    """Q, K or V of a packed tensor, which lie alike."""
    (tokens, _, *head), (token_stride, _, *strides) = qkv.shape, qkv.strides
    return qkv._replace(shape=torch.Size((tokens, *head)), strides=(token_stride, *strides))


def _rotation(
    x: TensorForm,
    cos: TensorForm,
    at_16: bool,
    source: LaunchSource,
    serving: Serving,
    first: int,
    parts: int,
    eps: float | None,
) -> Rotation:
    """Rotation beforehand of so many of Q and K, of which x is the first; eps None: no norm."""
    tokens, heads, head_dim = x.shape
    row = rotated_row(heads, head_dim, is_wide(head_dim))
    rows = [*x.strides[:2], parts * row, row]
    aligned, angle_unit, strides = in_units(rows, cos, at_16)
    looked_up = serving.rows or tokens * heads
    launch = find_launch("rotate", x.dtype, head_dim, 1, looked_up, source, aligned)
    programs = triton.cdiv(tokens, launch.block) * parts * triton.cdiv(heads, launch.block_k)
    split = head_split(head_dim)
    if launch.columns is not None:
        programs *= row // heads // launch.columns
    constants = (
        heads, head_dim, rotary_dim_of(cos, head_dim), *split, aligned, angle_unit,
        launch.columns, row // heads, parts,
        serving.embed, eps,
        launch.block, launch.block_k, can_warp_specialize(source),
    )  # fmt: skip
    call = make_call(
        rotate_kernel, programs, launch, (tokens, *strides), constants, x, cos, aligned
    )
    return Rotation(call, first, (tokens, parts, row))


def _fits_tile(qkv: tuple[TensorForm, ...], cos: TensorForm, at_16: bool, serving: Serving) -> bool:
    """Whether the window kernel serves tensors as they come."""
    _, _, head_dim = qkv[0].shape
    aligned, *_ = in_units(_strides(qkv), cos, at_16)
    return aligned and serving.max_seqlen <= window_limit(qkv[0].dtype, head_dim)


def _strides(qkv: Sequence[TensorForm]) -> list[int]:
    """Token and head strides; heads of a rotated row have places of their own."""
    return [n for x in qkv for n in (x.strides[0], x.strides[1] if len(x.shape) == 3 else 0)]


def _attention(
    read: tuple[TensorForm, ...],
    heads: int,
    at_16: bool,
    source: LaunchSource,
    serving: Serving,
    scale: float,
    fuse: str,
    eps: Eps,
) -> Call:
    """Attention that reads (q, k, v, cos, sin, cu_seqlens), q of so many heads.

    at_16: their addresses are aligned. fuse: "qk", or what is rotated already, K ("q") or both,
    which are [tokens, row] and need no norm any more.
    """
    *qkv, cos, _, cu_seqlens = read
    x = qkv[-1]
    tokens, k_heads, head_dim = x.shape
    aligned, angle_unit, strides = in_units(_strides(qkv), cos, at_16)
    segments = cu_seqlens.shape[0] - 1
    max_seqlen, looked_up, shortest, shared, keeps_lse, embed = serving
    shape = x.dtype, head_dim, max_seqlen, looked_up or tokens * heads
    split = head_split(head_dim)
    if (
        fuse == "none"
        and aligned
        and can_describe(x.strides[:2])
        and is_warp_specialized(x.dtype, head_dim, max_seqlen, tokens, heads, source)
    ):
        numbers = tokens, segments, min(max_seqlen, tokens), scale * LOG2_E
        constants = heads, head_dim, *split, k_heads
        programs = triton.cdiv(tokens, HOPPER_LAUNCH.block) * heads
        kernel, launch = hopper_stream_kernel, HOPPER_LAUNCH
        call = make_call(kernel, programs, launch, numbers, constants, x, cos, aligned, keeps_lse)
        # It finds its segments while the rotation ends. Of the stream kernel several programs share
        # a multiprocessor: they would be dealt out unevenly.
        rows = HOPPER_ROWS, HOPPER_LAUNCH.block_k, HOPPER_LAUNCH.block_k
        return call._replace(tiles=head_tiles(qkv, rows, split), overlap=True)
    if aligned and max_seqlen <= window_limit(x.dtype, head_dim):
        launch = find_launch("window", *shape, source)
        kernel, programs, blocks = window_kernel, segments * heads, (launch.block, shared)
    else:
        name = "rotating_stream" if fuse == "qk" else "stream"
        launch = find_launch(name, *shape, source, aligned)
        programs = triton.cdiv(tokens, launch.block) * heads
        chunked = None, "ieee"
        if launch.columns is not None:  # else a tile holds a wide head, too
            split, chunked = (
                (launch.out_columns, 0),
                (launch.columns, precision(x.dtype, max_seqlen)),
            )
            programs *= triton.cdiv(head_dim, launch.out_columns)
        online = is_online(x.dtype, head_dim, max_seqlen)
        kernel, split = stream_kernel, (*split, *chunked)
        blocks = online, launch.block, launch.block_k, shortest
    numbers = tokens, segments, scale * LOG2_E, *strides
    q_eps, k_eps = eps if fuse == "qk" else (eps[0] if fuse == "q" else None, None)
    constants = (
        heads, head_dim, rotary_dim_of(cos, head_dim), *split, aligned, angle_unit, k_heads,
        embed if fuse != "none" else None, embed if fuse == "qk" else None, q_eps, k_eps, *blocks,
    )  # fmt: skip
    return make_call(kernel, programs, launch, numbers, constants, x, cos, aligned, keeps_lse)


def _wide_attention(
    read: tuple[TensorForm, ...],
    heads: int,
    source: LaunchSource,
    serving: Serving,
    scale: float,
    fuse: str,
) -> tuple[Partials | None, Call]:
    """Attention within short segments of wide heads; arguments as of `_attention`, all aligned."""
    *qkv, cos, _, cu_seqlens = read
    x = qkv[-1]
    tokens, k_heads, head_dim = x.shape
    _, angle_unit, strides = in_units(_strides(qkv), cos, True)
    segments = cu_seqlens.shape[0] - 1
    launch = find_launch(
        "wide", x.dtype, head_dim, serving.max_seqlen, serving.rows or tokens * heads, source
    )
    pairs, block, embed = segments * heads, launch.block, serving.embed
    splits = column_splits(pairs, head_dim, launch.columns, block)
    shares, rows = 1, block
    if splits > 1:
        shares, rows = out_shares(pairs, head_dim, launch.columns, block)
    overlap = splits > 1 and can_warp_specialize(source)
    numbers = tokens, segments, scale * LOG2_E, *strides
    constants = (
        heads, head_dim, rotary_dim_of(cos, head_dim), launch.columns, True, angle_unit, k_heads,
        embed if fuse != "none" else None, embed if fuse == "qk" else None,
        precision(x.dtype, serving.max_seqlen), block, splits, shares, rows,
    )  # fmt: skip

    def call(programs: int, is_first: bool) -> Call:
        how = launch, numbers, (*constants, is_first, overlap), x, cos, True, splits > 1
        return make_call(wide_kernel, pairs * programs, *how)

    partials = None
    if splits > 1:
        partials = Partials(call(splits, True), (pairs, splits, block, block))
    last = call(shares * (block // rows), False)
    return partials, last._replace(overlap=overlap)


def head_tiles(
    read: Sequence[TensorForm], rows: Sequence[int], split: tuple[int, int]
) -> tuple[Tile, ...]:
    """Main and tail tile of each, of so many rows; without a tail the main tile stands in.

    Those that are rotated are [tokens, row], as rotate_kernel writes them, others [tokens, heads,
    head_dim].
    """
    main, tail = split
    return tuple(
        make_tile(i, x.dtype, tuple(x.shape), x.strides, [n, *[1] * (len(x.shape) - 2), columns])
        for i, (x, n) in enumerate(zip(read, rows, strict=True))
        for columns in (main, tail or main)
    )


def rotary_dim_of(cos: TensorForm, head_dim: int) -> int:
    """Columns of a head that have angles: all, if positions stand in place of cos."""
    return 2 * cos.shape[1] if len(cos.shape) == 2 else head_dim


def in_units(rows: list[int], cos: TensorForm, at_16: bool) -> tuple[bool, int, tuple[int, ...]]:
    """Token and head strides of rows, in elements, and that of the angles in the kernels' units.

    Returns whether rows, and by at_16 all addresses, are aligned to 16 bytes, so that their strides
    count 8 elements; how many the angles' stride counts; and the strides, the angles' last.
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
    cos: TensorForm,
    aligned: bool,
    keeps_lse: bool = False,
) -> Call:
    """A launch of which x and cos are tensors; the dtypes of the others are to follow from theirs.

    aligned: all tensors' rows are, see in_units. keeps_lse: it takes the
    log-sum-exps' address.
    """
    # A larger number is 64 bits wide to Triton, for which it compiles anew.
    known = aligned and max(numbers) < 2**31
    compiled_for = *constants, keeps_lse
    dtypes = x.dtype, cos.dtype
    binary = binary_of(kernel, dtypes, x.device, compiled_for, launch) if known else None
    return Call(kernel, programs, launch, numbers, constants, x.device.index, binary)
