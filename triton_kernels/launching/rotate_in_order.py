"""Rotation in front of a library's attention: the columns of a head keep their order.

The attention kernels here read what rotate_kernel writes.
"""

import math

import torch
import triton

from triton_kernels.kernels.rotate_in_order import rotate_in_order_kernel
from triton_kernels.launching.fast_path import form_of, plans
from triton_kernels.launching.launch import Call, launch_kernel
from triton_kernels.launching.plan import Form, TensorForm, in_units, make_call
from triton_kernels.launching.table import Launch

# Vectors of a program, one for each thread; all shapes are alike to it.
LAUNCH = Launch(block=256, block_k=1, num_warps=8, num_stages=1)


def rotate_in_order(
    x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Rotate x into out, which may be x itself, on the current device.

    Args:
        x, out: [tokens, heads, head_dim] of one dtype, with a contiguous last axis.
        cos, sin: [tokens, rotary_dim / 2] fp32, of the same strides, contiguous in the last axis.
            Dims behind rotary_dim are left as they are in out.

    Raises:
        TypeError: dtypes are not as stated above.
    """
    tensors = x, out, cos, sin
    addresses = [tensor.data_ptr() for tensor in tensors]
    key = form_of(tensors), all(address % 16 == 0 for address in addresses)
    call = plans.get(key)
    if call is None:
        call = plans[key] = rotate_in_order_call(*key)
    launch_kernel(call, tensors, addresses)


def rotate_in_order_call(form: Form, at_16: bool) -> Call:
    """What is launched for the form of (x, out, cos, sin)."""
    x, out, cos, sin = (TensorForm(*each) for each in form)
    # The binary is known by the dtypes of x and cos.
    if out.dtype != x.dtype or not cos.dtype == sin.dtype == torch.float32:
        raise TypeError(
            f"x and out must have one dtype, cos and sin float32, got {x.dtype}, {out.dtype}, "
            f"{cos.dtype} and {sin.dtype}"
        )
    tokens, heads, _ = x.shape
    half = cos.shape[1]
    vector = math.gcd(half, 16 // x.dtype.itemsize)
    aligned, angle_unit, strides = in_units([*x.strides[:2], *out.strides[:2]], cos, at_16)
    programs = triton.cdiv(tokens * heads * (half // vector), LAUNCH.block)
    constants = heads, half, vector, aligned, angle_unit, LAUNCH.block
    numbers = tokens, *strides
    return make_call(rotate_in_order_kernel, programs, LAUNCH, numbers, constants, x, cos, aligned)
