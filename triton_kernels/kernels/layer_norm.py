"""LayerNorm of rows that a program holds in registers, also of a sum that is written back."""

import triton
import triton.language as tl

from triton_kernels.kernels.tiles import cast


@triton.jit
def layer_norm_kernel(
    x_ptr,  # [tokens, HIDDEN]
    branch_ptr,  # the same, what is added to x first; None: nothing, and x stays as it is
    weight_ptr, bias_ptr,  # [HIDDEN]
    normed_ptr,
    eps,
    # width of a row, and the power of two that holds it
    HIDDEN: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program for each token."""
    channel = tl.arange(0, CHANNELS)
    inside = channel < HIDDEN
    place = tl.program_id(0).to(tl.int64) * HIDDEN + channel
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if branch_ptr is not None:
        x += tl.load(branch_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_ptr + place, cast(x, x_ptr.dtype.element_ty), mask=inside)
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    # In fp32 and of the mean's distance, as a sum of squares would lose what a large mean hides.
    centred = tl.where(inside, x - tl.sum(x, 0) / HIDDEN, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / HIDDEN + eps)
    normed = cast(centred * scale * weight + bias, normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + place, normed, mask=inside)
