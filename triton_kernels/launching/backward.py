"""Gradients by a kernel: of which calls, and their launch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction

from triton_kernels.checks import MAX_TILED_HEAD_DIM, MAX_TOKEN_STRIDE
from triton_kernels.kernels.stream_backward import (
    stream_backward_kv_kernel,
    stream_backward_q_kernel,
)
from triton_kernels.kernels.window_backward import window_backward_kernel
from triton_kernels.launching.choose import (
    HOPPER_KEYS_LAUNCH,
    HOPPER_LAUNCH,
    HOPPER_ROWS,
    LaunchSource,
    find_launch,
    has_specialized_gradients,
    head_split,
    hopper_backward_kv_kernel,
    hopper_backward_q_kernel,
    launch_source,
    window_limit,
)
from triton_kernels.launching.descriptors import can_describe
from triton_kernels.launching.fast_path import form_of, plans
from triton_kernels.launching.launch import Call, launch_kernel
from triton_kernels.launching.plan import (
    LOG2_E,
    Form,
    Rotation,
    Serving,
    TensorForm,
    head_tiles,
    in_units,
    launch_rotations,
    make_call,
    part_of,
    rotate_first,
)
from triton_kernels.launching.table import Launch


class StreamBackward(NamedTuple):
    """All launches for the gradients of long segments."""

    rotations: tuple[Rotation, ...]
    queries: Call
    keys: Call  # behind it


def has_gradient_kernels(head_dim: int, embed: str) -> bool:
    """Whether kernels compute gradients in Q, K and V: of rotated heads that a tile holds."""
    return embed == "rope" and head_dim <= MAX_TILED_HEAD_DIM


def needs_lse(dtype: torch.dtype, head_dim: int, max_seqlen: int) -> bool:
    """Whether gradients in Q, K and V need what the forward pass keeps, as no tile holds a segment.

    In shorter ones all is computed again from what it read.
    """
    return max_seqlen > window_limit(dtype, head_dim)


def attention_gradients(
    grad: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor,
    kept: Sequence[torch.Tensor],
    max_seqlen: int,
    scale: float,
) -> list[torch.Tensor]:
    """The gradients in q, k and v, or in qkv, all contiguous, by kernels.

    grad is of the result, tensors are (q, k, v, cos, sin), or (qkv, cos, sin), not empty; kept are
    the result, contiguous, and the log-sum-exp of each row, or nothing if `needs_lse` says so.
    """
    device = grad.device
    # Triton launches on the current device, which need not be the tensors'.
    if device.index is not None and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return attention_gradients(grad, tensors, cu_seqlens, kept, max_seqlen, scale)
    *qkv, cos, sin = tensors
    *qkv, grad = (x if _is_readable(x) else _copied(x) for x in (*qkv, grad))
    if not (_is_readable(cos) and _is_readable(sin)):
        cos, sin = _copied(cos), _copied(sin)  # both, as their strides are to be the same
    read = (*qkv, grad, cos, sin, cu_seqlens)
    form, source = form_of(read), launch_source(device.index)
    make = _stream_backward if kept else _window_backward
    key = make, form, source, max_seqlen, scale
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = make(form, source, max_seqlen, scale)
    written = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in qkv]
    angles = cos.data_ptr(), sin.data_ptr()
    last = *angles, cu_seqlens.data_ptr()
    if not kept:
        addresses = *_parts(qkv), grad.data_ptr(), *_parts(written), *last
        launch_kernel(plan, (*read, *written), addresses)
        return written
    out, lse = kept = [x.contiguous() for x in kept]  # as the operator may have been called
    delta = torch.empty_like(lse)
    held = [*read, *kept, *written, delta]
    parts = _parts(qkv)
    launch_rotations(plan.rotations, grad, held, parts, angles, [None, None])
    out, grad, lse, delta = (x.data_ptr() for x in (out, grad, lse, delta))
    q_grad, k_grad, v_grad = _parts(written)
    by_queries, by_keys = (lse, delta, q_grad, *last), (lse, delta, k_grad, v_grad, *last)
    if plan.queries.tiles:
        described = *parts, grad
        launch_kernel(plan.queries, held, (out, *by_queries), described)
        launch_kernel(plan.keys, held, by_keys, described)
    else:
        launch_kernel(plan.queries, held, (*parts, out, grad, *by_queries))
        launch_kernel(plan.keys, held, (*parts, grad, *by_keys))
    return written


def _is_readable(x: torch.Tensor) -> bool:
    """Whether the kernel can read a tensor 16 bytes at a time; of cos and sin, its beginning."""
    *strides, last = x.stride()
    aligned = x.data_ptr() % 16 == 0 and (x.ndim == 2 or all(n % 8 == 0 for n in strides))
    return last == 1 and aligned and strides[0] <= MAX_TOKEN_STRIDE


def _copied(x: torch.Tensor) -> torch.Tensor:
    """A readable copy.

    The forward kernels read other tensors in place, by smaller tiles: see `find_launch`. Here a
    window's tile has to hold a segment, and long segments are read many times: to read one element
    at a time would take longer than copying.
    """
    return x.clone(memory_format=torch.contiguous_format)


def _parts(qkv: Sequence[torch.Tensor]) -> list[int]:
    """Where Q, K and V begin, or their gradients."""
    if len(qkv) == 3:
        return [x.data_ptr() for x in qkv]
    [x] = qkv
    return [x.data_ptr() + i * x.stride(1) * x.itemsize for i in range(3)]


def _window_backward(form: Form, source: LaunchSource, max_seqlen: int, scale: float) -> Call:
    """What is launched for the form of (q, k, v, grad, cos, sin, cu_seqlens), or (qkv, grad, ...).

    All of them aligned.
    """
    q, k, v, grad, cos, cu_seqlens, parts = _taken_apart(form)
    tokens, heads, head_dim = v.shape
    launch = find_launch("window_backward", v.dtype, head_dim, max_seqlen, tokens * heads, source)
    read, programs = (q, k, v, grad), (cu_seqlens.shape[0] - 1) * heads
    blocks = launch.block, launch.num_stages > 1
    tensors = read, v, cos, cu_seqlens, parts
    return _call(window_backward_kernel, programs, launch, tensors, scale, blocks)


def _stream_backward(
    form: Form, source: LaunchSource, max_seqlen: int, scale: float
) -> StreamBackward:
    """The same for segments that no tile holds."""
    q, k, v, grad, cos, cu_seqlens, parts = _taken_apart(form)
    tokens, heads, head_dim = v.shape
    is_behind = parts == 3 and form[0][3][1] == heads * q.strides[1]
    serving = Serving(max_seqlen)
    q, k, rotations = rotate_first(q, k, cos, True, is_behind, source, serving, "none")
    tensors = (q, v, grad), v, cos, cu_seqlens, parts
    if all(can_describe(x.strides[:2]) for x in (v, grad)) and has_specialized_gradients(
        v.dtype, head_dim, max_seqlen, tokens, heads, source
    ):
        return StreamBackward(rotations, *_hopper_backward(tensors, max_seqlen, scale))
    shape = v.dtype, head_dim, max_seqlen, tokens * heads, source

    def call(name: str, kernel: JITFunction, by_keys: bool) -> Call:
        launch = find_launch(name, *shape)
        blocks = launch.block, launch.block_k
        programs = triton.cdiv(tokens, blocks[by_keys]) * heads
        return _call(kernel, programs, launch, tensors, scale, blocks)

    queries = call("stream_backward_q", stream_backward_q_kernel, False)
    keys = call("stream_backward_kv", stream_backward_kv_kernel, True)
    return StreamBackward(rotations, queries, keys)


def _hopper_backward(tensors: tuple, max_seqlen: int, scale: float) -> tuple[Call, Call]:
    """The same by the warp-specialized kernels."""
    (q, v, grad), _, cos, cu_seqlens, parts = tensors
    tokens, heads, head_dim = v.shape
    split = head_split(head_dim)
    _, angle_unit, (angle_stride,) = in_units([], cos, True)
    numbers = tokens, cu_seqlens.shape[0] - 1, min(max_seqlen, tokens), scale * LOG2_E, angle_stride
    constants = heads, head_dim, 2 * cos.shape[1], *split, angle_unit, parts
    programs = triton.cdiv(tokens, HOPPER_LAUNCH.block) * heads

    def call(kernel: JITFunction, launch: Launch, query_rows: int, key_rows: int) -> Call:
        rows = query_rows, key_rows, key_rows, query_rows
        made = make_call(kernel, programs, launch, numbers, constants, v, cos, True)
        return made._replace(tiles=head_tiles((q, q, v, grad), rows, split))

    queries = call(hopper_backward_q_kernel, HOPPER_LAUNCH, HOPPER_ROWS, HOPPER_LAUNCH.block_k)
    keys = call(
        hopper_backward_kv_kernel, HOPPER_KEYS_LAUNCH, HOPPER_KEYS_LAUNCH.block, HOPPER_ROWS
    )
    # It finds its segments while the rotation ends.
    return queries._replace(overlap=True), keys


def _taken_apart(form: Form) -> tuple[TensorForm | int, ...]:
    """q, k, v, the result's gradient, cos and cu_seqlens; how many gradients lie side by side."""
    *qkv, grad, cos, _, cu_seqlens = (TensorForm(*x) for x in form)
    q, k, v = [part_of(qkv[0])] * 3 if len(qkv) == 1 else qkv
    return q, k, v, grad, cos, cu_seqlens, 3 // len(qkv)


def _call(
    kernel: JITFunction,
    programs: int,
    launch: Launch,
    tensors: tuple,
    scale: float,
    blocks: tuple[int, ...],
) -> Call:
    """One kernel on (what is read, v, cos, cu_seqlens, gradients side by side)."""
    read, v, cos, cu_seqlens, parts = tensors
    tokens, heads, head_dim = v.shape
    rows = [n for x in read for n in (x.strides[:2] if len(x.shape) == 3 else x.strides[:1])]
    _, angle_unit, strides = in_units(rows, cos, True)
    numbers = tokens, cu_seqlens.shape[0] - 1, scale * LOG2_E, *strides
    constants = (
        heads, head_dim, 2 * cos.shape[1], *head_split(head_dim), angle_unit, parts, *blocks,
    )  # fmt: skip
    return make_call(kernel, programs, launch, numbers, constants, v, cos, True)
