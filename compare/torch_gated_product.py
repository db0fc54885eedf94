"""Gate and up of an MLP behind a late norm, activated in the kernel that multiplies.

Why, flax_models/gated_product.py says, whose twin this is.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from compare.torch_gated import Biases, gated_activation, load, silu_times
from triton_kernels.attention import runs_kernel
from triton_kernels.launch_table import Launch, next_power_of_2
from triton_kernels.tiles import cast, dot

# A tile has 128 rows and 128 columns of each of gate and up, for which 64 channels are multiplied
# at a time. Programs that run at once share operands: 8 tiles of rows go through all columns.
_LAUNCH = Launch(block=128, block_k=64, num_warps=8, num_stages=3)
_GROUP = 8

# Of a program of the kernel before it, which has one row.
_NORM_WARPS = 4

# Of fewer tokens there are too few tiles to fill the GPU evenly, and cuBLAS has others.
_FEWEST_TOKENS = 2048


def gated_product(
    stream: torch.Tensor, weight: torch.Tensor, biases: Biases, eps: float, implementation: str
) -> torch.Tensor:
    """silu(gate) x up of [gate, up] = (stream weight^T + biases.product) / rms + biases.output.

    In one kernel where that is faster than in two.

    Args:
        stream: [tokens, hidden] floating; rms are the root mean squares of its rows with
            biases.stream added.
        weight: [2 x width, hidden], gate above up.
        biases: see there.
        eps: of the norm, added to the mean square.
        implementation: as in `triton_kernels`.

    Returns:
        [tokens, width] in the dtype of the stream.
    """
    return _multiply(stream, weight, *biases, eps, implementation)


# An operator, so that compiled blocks take it as it is, and are not compiled again for few tokens.
@torch.library.custom_op("late_norm::gated_product", mutates_args=())
def _multiply(
    stream: torch.Tensor,
    weight: torch.Tensor,
    stream_bias: torch.Tensor,
    product_bias: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    implementation: str,
) -> torch.Tensor:
    biases = Biases(stream_bias, product_bias, bias)
    if runs_kernel(stream.device, implementation) and _is_faster(stream):
        return in_one_kernel(stream, weight, biases, eps)
    product = _unnormed_product(stream, weight)
    return gated_activation(product, stream, biases, eps, implementation)


@_multiply.register_fake
def _(stream: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return stream.new_empty((stream.shape[0], weight.shape[0] // 2))


def in_one_kernel(
    stream: torch.Tensor, weight: torch.Tensor, biases: Biases, eps: float
) -> torch.Tensor:
    """What `gated_product` does, without asking what is faster.

    Of 16-bit floating numbers.

    Raises:
        ValueError: hidden is no multiple of 64.
    """
    (tokens, hidden), width = stream.shape, weight.shape[0] // 2
    if hidden % _LAUNCH.block_k:
        raise ValueError(f"hidden must be a multiple of {_LAUNCH.block_k}, got {hidden}")
    stream, weight = stream.contiguous(), weight.contiguous()  # the kernels know no strides
    scale = stream.new_empty(tokens, dtype=torch.float32)
    out = stream.new_empty((tokens, width))
    programs = triton.cdiv(tokens, _LAUNCH.block) * triton.cdiv(width, _LAUNCH.block)
    with torch.cuda.device_of(stream):  # Triton launches on the current device
        norm_scale_kernel[(tokens,)](
            stream, biases.stream, scale, eps, hidden, next_power_of_2(hidden),
            num_warps=_NORM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
        gated_product_kernel[(programs,)](
            stream, weight, scale, biases.product, biases.output, out, tokens,
            hidden, width, _LAUNCH.block, _LAUNCH.block_k, _GROUP,
            num_warps=_LAUNCH.num_warps, num_stages=_LAUNCH.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _is_faster(stream: torch.Tensor) -> bool:
    """Whether one kernel is; measured on GPUs of compute capability 9.0."""
    tokens, hidden = stream.shape
    return (
        tokens >= _FEWEST_TOKENS
        and hidden % _LAUNCH.block_k == 0
        and stream.dtype.itemsize == 2
        and stream.is_cuda
        and _compute_capability(stream.device.index) == (9, 0)
    )


@functools.cache
def _compute_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _unnormed_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T; of fp16 in fp32, because rows that no norm has divided are too large for fp16."""
    if x.dtype != torch.float16:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


@triton.jit
def norm_scale_kernel(
    stream_ptr, stream_bias_ptr, scale_ptr, eps,
    # width of a row, and the power of two that holds it
    HIDDEN: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One over the root mean square of a token's row; one program for each token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    in_stream = channel < HIDDEN
    x = load(stream_ptr + token * HIDDEN + channel, in_stream)
    x += load(stream_bias_ptr + channel, in_stream)
    tl.store(scale_ptr + token, tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps))


@triton.jit(do_not_specialize=("tokens",))
def gated_product_kernel(
    stream_ptr, weight_ptr, scale_ptr,
    product_bias_ptr, bias_ptr,
    out_ptr, tokens,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    # rows of a tile and columns of each half, channels at a time, tiles of rows in a group
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program for each tile of the result."""
    row_block, column_block = place(tl.program_id(0), tokens, WIDTH, BLOCK, GROUP)
    first = row_block.to(tl.int64) * BLOCK
    row = tl.arange(0, BLOCK)
    column = column_block * BLOCK + tl.arange(0, BLOCK)
    in_stream, in_width = row < tokens - first, column < WIDTH
    # Rows and columns past the last are computed from the first, and not written.
    stream_row = tl.where(in_stream, row, 0)
    both = tl.arange(0, 2 * BLOCK)
    weight_row = column_block * BLOCK + both % BLOCK
    weight_row = tl.where(weight_row < WIDTH, weight_row, 0) + both // BLOCK * WIDTH
    channel = tl.arange(0, DEPTH)
    stream_ptrs = stream_ptr + first * HIDDEN + stream_row[:, None] * HIDDEN + channel[None, :]
    weight_ptrs = weight_ptr + weight_row[:, None] * HIDDEN + channel[None, :]

    acc = tl.zeros([BLOCK, 2 * BLOCK], tl.float32)
    for step in range(0, HIDDEN // DEPTH):
        x = tl.load(stream_ptrs + step * DEPTH)  # [BLOCK, DEPTH]
        w = tl.load(weight_ptrs + step * DEPTH)  # [2 BLOCK, DEPTH]
        acc = dot(x, tl.trans(w), acc)
    gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK, 2, BLOCK]), [0, 2, 1]))

    scale = load(scale_ptr + first + row, in_stream)[:, None]
    gate += load(product_bias_ptr + column, in_width)[None, :]
    up += load(product_bias_ptr + WIDTH + column, in_width)[None, :]
    gate = gate * scale + load(bias_ptr + column, in_width)[None, :]
    up = up * scale + load(bias_ptr + WIDTH + column, in_width)[None, :]
    y = silu_times(gate, up)
    out_ptr += first * WIDTH
    mask = in_stream[:, None] & in_width[None, :]
    out_ptrs = out_ptr + row[:, None] * WIDTH + column[None, :]
    tl.store(out_ptrs, cast(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def place(program, tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The tile of a program: groups of rows, in them column after column, in that row after row."""
    row_blocks, column_blocks = tl.cdiv(tokens, BLOCK), tl.cdiv(WIDTH, BLOCK)
    first = program // (GROUP * column_blocks) * GROUP
    rows = tl.minimum(row_blocks - first, GROUP)
    within = program % (GROUP * column_blocks)
    return first + within % rows, within // rows
