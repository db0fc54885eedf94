"""An MLP's gated activation that applies the norm before the MLP on its way.

Why, flax_models/gated.py says, whose twin this is.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from triton_kernels.attention import runs_kernel
from triton_kernels.kernels.gated import silu_times
from triton_kernels.kernels.tiles import cast
from triton_kernels.launching.table import next_power_of_2

# Of a program, which has one row; a row of 3,456 channels is 16 values a thread.
_WARPS = 8


class Biases(NamedTuple):
    """What is added on the way, each of any floating dtype.

    Attributes:
        stream: [hidden], which the residual stream lacks.
        product: [2 x width], which its product lacks by that.
        output: [2 x width], of gate and up.
    """

    stream: torch.Tensor
    product: torch.Tensor
    output: torch.Tensor


def gated_activation(
    product: torch.Tensor, stream: torch.Tensor, biases: Biases, eps: float, implementation: str
) -> torch.Tensor:
    """silu(gate) x up of [gate, up] = (product + biases.product) / rms + biases.output.

    Args:
        product: [tokens, 2 x width] of any floating dtype, gate and up beside each other.
        stream: [tokens, hidden] floating; rms are the root mean squares of its rows with
            biases.stream added.
        biases: see there.
        eps: of the norm, added to the mean square.
        implementation: as in `triton_kernels`.

    Returns:
        [tokens, width] in the dtype of the stream; computed in fp32 and rounded once.
    """
    run = _kernel if runs_kernel(stream.device, implementation) else _reference
    return run(eps, product, stream, *biases)


def _reference(
    eps: float, product: torch.Tensor, stream: torch.Tensor, *biases: torch.Tensor
) -> torch.Tensor:
    stream_bias, product_bias, bias = (each.float() for each in biases)
    x = stream.float() + stream_bias
    scale = torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps)
    product = product.float() + product_bias
    gate, up = (product * scale + bias).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(stream.dtype)


def _kernel(
    eps: float, product: torch.Tensor, stream: torch.Tensor, *biases: torch.Tensor
) -> torch.Tensor:
    tokens, width = product.shape[0], product.shape[1] // 2
    hidden = stream.shape[1]
    product, stream = product.contiguous(), stream.contiguous()  # the kernel knows no strides
    out = stream.new_empty((tokens, width))
    with torch.cuda.device_of(stream):  # Triton launches on the current device
        gated_kernel[(tokens,)](
            product, stream, *biases, out, eps,
            hidden, width, next_power_of_2(hidden), next_power_of_2(width),
            num_warps=_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@triton.jit
def gated_kernel(
    product_ptr, stream_ptr,
    stream_bias_ptr, product_bias_ptr, bias_ptr,
    out_ptr, eps,
    # widths of a row, and the powers of two that hold them
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program for each token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    column = tl.arange(0, COLUMNS)
    in_stream, in_width = channel < HIDDEN, column < WIDTH
    stream_ptr += token * HIDDEN
    product_ptr += token * 2 * WIDTH
    out_ptr += token * WIDTH

    x = load(stream_ptr + channel, in_stream)
    gate = load(product_ptr + column, in_width)
    up = load(product_ptr + WIDTH + column, in_width)
    x += load(stream_bias_ptr + channel, in_stream)
    gate += load(product_bias_ptr + column, in_width)
    up += load(product_bias_ptr + WIDTH + column, in_width)
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    gate = gate * scale + load(bias_ptr + column, in_width)
    up = up * scale + load(bias_ptr + WIDTH + column, in_width)
    y = silu_times(gate, up)
    tl.store(out_ptr + column, cast(y, out_ptr.dtype.element_ty), mask=in_width)


@triton.jit
def load(ptr, mask):
    """Values in fp32; zero where masked."""
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


# Writes into the stream, which PyTorch's compiler would otherwise copy first.
@torch.library.custom_op("late_norm::add_product", mutates_args=("stream",))
def add_product(stream: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """stream += x weight^T, for [tokens, hidden], [tokens, width] and [hidden, width].

    The product's epilogue adds it, in fp32.
    """
    stream.addmm_(x, weight.t())


@add_product.register_fake
def _(stream: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    return None
