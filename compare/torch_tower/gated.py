"""An MLP's gated activation that applies the norm before the MLP on its way.

Why, flax_models/gated.py says, whose twin this is.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from flax_models.common.weights import Biases
from triton_kernels.attend import runs_kernel
from triton_kernels.checks import is_exporting
from triton_kernels.kernels.gated import silu_times
from triton_kernels.kernels.tiles import cast
from triton_kernels.launching.table import next_power_of_2

# Of a program, which has one row; a row of 3,456 channels is 16 values a thread.
_WARPS = 8


def gated_activation(
    product: torch.Tensor, residual: torch.Tensor, biases: Biases, eps: float, implementation: str
) -> torch.Tensor:
    """silu(gate) x up of [gate, up] = (product + biases.product) / rms + biases.output.

    Arguments and result, [tokens, width] in the dtype of the residual stream, are the twin's.
    """
    run = _kernel if runs_kernel(residual.device, implementation) else _reference
    return run(eps, product, residual, *biases)


def _reference(
    eps: float, product: torch.Tensor, residual: torch.Tensor, *biases: torch.Tensor
) -> torch.Tensor:
    stream_bias, product_bias, bias = (each.float() for each in biases)
    x = residual.float() + stream_bias
    scale = torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps)
    product = product.float() + product_bias
    gate, up = (product * scale + bias).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(residual.dtype)


def _kernel(
    eps: float, product: torch.Tensor, residual: torch.Tensor, *biases: torch.Tensor
) -> torch.Tensor:
    tokens, width = product.shape[0], product.shape[1] // 2
    hidden = residual.shape[1]
    product, residual = product.contiguous(), residual.contiguous()  # the kernel knows no strides
    out = residual.new_empty((tokens, width))
    with torch.cuda.device_of(residual):  # Triton launches on the current device
        gated_kernel[(tokens,)](
            product, residual, *biases, out, eps,
            hidden, width, next_power_of_2(hidden), next_power_of_2(width),
            num_warps=_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@triton.jit
def gated_kernel(
    product_ptr, residual_ptr,
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
    in_residual, in_width = channel < HIDDEN, column < WIDTH
    residual_ptr += token * HIDDEN
    product_ptr += token * 2 * WIDTH
    out_ptr += token * WIDTH

    x = load(residual_ptr + channel, in_residual)
    gate = load(product_ptr + column, in_width)
    up = load(product_ptr + WIDTH + column, in_width)
    x += load(stream_bias_ptr + channel, in_residual)
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


def unnormed_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T; of fp16 in fp32, because rows that no norm has divided are too large for fp16."""
    if x.dtype != torch.float16:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def add_product(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """residual += x weight^T, for [tokens, hidden], [tokens, width] and [hidden, width].

    The product's epilogue adds it, in fp32. That of fp16 may be split into sums that are rounded,
    where the biases that it holds are beyond fp16.
    """
    add = _add_product if is_exporting() else _add_product_operator
    add(residual, x, weight)


def _add_product(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    if residual.dtype == torch.float16:
        residual.copy_(residual + unnormed_product(x, weight))
    else:
        residual.addmm_(x, weight.t())


# Writes into the residual stream, which PyTorch's compiler would otherwise copy first.
_add_product_operator = torch.library.custom_op(
    "late_norm::add_product", _add_product, mutates_args=("residual",)
)


@_add_product_operator.register_fake
def _(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    return None
