"""Gradients by a kernel: of which calls, and their launch."""

from collections.abc import Sequence

import torch

from triton_kernels.checks import MAX_TOKEN_STRIDE
from triton_kernels.kernels.window_backward import window_backward_kernel
from triton_kernels.launching.choose import (
    LaunchSource,
    find_launch,
    head_split,
    launch_source,
    window_limit,
)
from triton_kernels.launching.fast_path import form_of, plans
from triton_kernels.launching.launch import Call, launch_kernel
from triton_kernels.launching.plan import LOG2_E, Form, TensorForm, in_units, make_call, part_of


def has_backward(dtype: torch.dtype, head_dim: int, max_seqlen: int) -> bool:
    """Whether a kernel computes the gradients in Q, K and V: where the window kernel serves."""
    return max_seqlen <= window_limit(dtype, head_dim)


def attention_gradients(
    grad: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> list[torch.Tensor]:
    """The gradients in q, k and v, or in qkv, all contiguous, by the kernel of `has_backward`.

    grad is of the result, tensors are (q, k, v, cos, sin), or (qkv, cos, sin), not empty.
    """
    device = grad.device
    # Triton launches on the current device, which need not be the tensors'.
    if device.index is not None and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return attention_gradients(grad, tensors, cu_seqlens, max_seqlen, scale)
    *qkv, cos, sin = tensors
    *qkv, grad = (x if _is_readable(x) else _copied(x) for x in (*qkv, grad))
    if not (_is_readable(cos) and _is_readable(sin)):
        cos, sin = _copied(cos), _copied(sin)  # both, as their strides are to be the same
    read = (*qkv, grad, cos, sin, cu_seqlens)
    form, source = form_of(read), launch_source(device.index)
    key = window_backward_kernel, form, source, max_seqlen, scale
    call = plans.get(key)
    if call is None:
        call = plans[key] = _window_backward(form, source, max_seqlen, scale)
    written = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in qkv]
    angles = cos.data_ptr(), sin.data_ptr()
    addresses = *_parts(qkv), grad.data_ptr(), *_parts(written), *angles, cu_seqlens.data_ptr()
    launch_kernel(call, (*read, *written), addresses)
    return written


def _is_readable(x: torch.Tensor) -> bool:
    """Whether the kernel can read a tensor 16 bytes at a time; of cos and sin, its beginning."""
    *strides, last = x.stride()
    aligned = x.data_ptr() % 16 == 0 and (x.ndim == 2 or all(n % 8 == 0 for n in strides))
    return last == 1 and aligned and strides[0] <= MAX_TOKEN_STRIDE


def _copied(x: torch.Tensor) -> torch.Tensor:
    """A readable copy.

    The forward kernels read other tensors in place, by smaller tiles: see `find_launch`. Here a
    tile has to hold a segment, and reading one element at a time would take longer than copying.
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
    *qkv, grad, cos, _, cu_seqlens = (TensorForm(*x) for x in form)
    parts = 3 // len(qkv)
    q, k, v = [part_of(qkv[0])] * 3 if parts == 3 else qkv
    tokens, heads, head_dim = v.shape
    segments = cu_seqlens.shape[0] - 1
    _, angle_unit, strides = in_units(
        [n for x in (q, k, v, grad) for n in x.strides[:2]], cos, True
    )
    launch = find_launch("window_backward", v.dtype, head_dim, max_seqlen, tokens * heads, source)
    numbers = tokens, segments, scale * LOG2_E, *strides
    constants = (
        heads, head_dim, 2 * cos.shape[1], *head_split(head_dim), angle_unit, parts,
        launch.block, launch.num_stages > 1,
    )  # fmt: skip
    kernel, programs = window_backward_kernel, segments * heads
    return make_call(kernel, programs, launch, numbers, constants, v, True)
