"""All launches of a call, worked out by attention.py or, for a call like an earlier one, looked up.

What is launched follows from the form of a call's tensors and from its options. An earlier call of
both has checked them and has compiled. The host may take longer for a call than the GPU, so a later
one does no more than it must.
"""

from typing import NamedTuple

import torch

from triton_kernels.launching.choose import launch_settings
from triton_kernels.launching.launch import launch, run
from triton_kernels.launching.plan import Form, Plan, form_of
from triton_kernels.launching.table import Table

Tensors = tuple[torch.Tensor, ...]
# max_seqlen, scale, fuse and implementation, as they are passed.
Options = tuple[int | None, float | None, str, str]
# What calls that launch the same have in common, but for addresses.
Key = tuple[Form, Options, Table, bool]


class Known(NamedTuple):
    """What was launched for a call whose tensors were aligned.

    Attributes:
        plan: all of it.
        part: bytes from Q to K and from K to V in a packed tensor; None if they are separate.
        behind: bytes from Q to K where one launch rotates both, if they are separate and rotated;
            else None.
        shape, strides: of the result.
    """

    plan: Plan
    part: int | None
    behind: int | None
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]


_known: dict[Key, Known] = {}
MAX_KNOWN = 4096


def key_of(tensors: Tensors, options: Options) -> Key | None:
    """What a call that goes unseen is looked up by, of (q, k, v, cos, ...) or (qkv, cos, ...).

    None where equal options need not be as good: 64 is a bound, 64.0 is none.
    """
    max_seqlen, scale, fuse, implementation = options
    plain = type(max_seqlen) is int and type(fuse) is type(implementation) is str
    if not plain or not (scale is None or type(scale) is float):
        return None
    return form_of(tensors), options, *launch_settings()


def remember(key: Key, plan: Plan) -> None:
    """Have later calls of the key launch what this one did.

    But where Triton has to look at a launch each time, as of tensors that are not aligned, or
    interprets it.
    """
    binaries = [call.binary for call in (*(r.call for r in plan.rotations), plan.attention)]
    if any(binary is None or binary.compiled is None for binary in binaries):
        return
    form = key[0]
    dtype, _, (tokens, *_, heads, head_dim), strides = form[0]
    part = behind = None
    if len(form) == 4:
        part = strides[1] * dtype.itemsize
    elif plan.rotations and plan.rotations[0].first == 0:
        behind = heads * strides[1] * dtype.itemsize
    known = Known(plan, part, behind, (tokens, heads, head_dim), (heads * head_dim, head_dim, 1))
    if len(_known) == MAX_KNOWN:
        _known.clear()
    _known[key] = known


def launch_again(key: Key, tensors: Tensors) -> torch.Tensor | None:
    """The result of a call on the current device, if one like it was made before.

    By addresses, as views of tensors take time. None where the call has to go the long way: no
    other was like it, its tensors lie otherwise, or Triton has to look at its launches.
    """
    known = _known.get(key)
    if known is None:
        return None
    (rotations, attention), part, behind, shape, strides = known
    device = attention.device
    if device is not None and device != torch.cuda.current_device():
        return None
    x = tensors[0]
    *qkv, cos, sin, cu_seqlens = [tensor.data_ptr() for tensor in tensors]
    if part is not None:
        qkv = [qkv[0], qkv[0] + part, qkv[0] + 2 * part]
    q, k, v = qkv
    if (q | k | v | cos | sin) % 16 > 0:
        return None
    if behind is not None and (k - q == behind) != (len(rotations) == 1):
        return None
    held = []  # until all is launched
    for call, first, written in rotations:
        rotated = torch.empty(written, dtype=x.dtype, device=x.device)
        held.append(rotated)
        address = rotated.data_ptr()
        if not launch(call, (qkv[first], address, cos, sin)):
            return None
        for i in range(written[1]):
            qkv[first + i] = address + i * written[2] * x.itemsize
    out = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    if attention.tiles:
        launched = launch(attention, (out.data_ptr(), cu_seqlens), qkv)
    else:
        launched = launch(attention, (*qkv, out.data_ptr(), cos, sin, cu_seqlens))
    return out if launched else None


def launch_plan(plan: Plan, tensors: Tensors) -> torch.Tensor:
    """The result of a call on the current device: `launch_again` for what Triton has to look at.

    tensors: (q, k, v, cos, sin, cu_seqlens).
    """
    rotations, attention = plan
    *qkv, cos, sin, cu_seqlens = tensors
    v = qkv[2]
    for call, first, written in rotations:
        rotated = torch.empty(written, dtype=v.dtype, device=v.device)
        run(call, (qkv[first], rotated, cos, sin))
        qkv[first : first + written[1]] = rotated.unbind(1)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if attention.tiles:
        run(attention, (out, cu_seqlens), qkv)
    else:
        run(attention, (*qkv, out, cos, sin, cu_seqlens))
    return out


def is_behind(k: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether K's heads lie behind Q's, as in a packed projection: as if q had twice as many."""
    return (
        k.data_ptr() - q.data_ptr() == q.shape[1] * q.stride(1) * q.itemsize
        and k.stride() == q.stride()
        # One token's may lie so by chance, and Triton's interpreter moves a GPU's storages apart.
        and k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    )
