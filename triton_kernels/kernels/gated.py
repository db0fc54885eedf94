"""A gated MLP's products and activation, also of widths that fast matrix kernels do not take."""

import triton
import triton.language as tl

from triton_kernels.kernels.tiles import cast, dot

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def silu_times(gate, up):
    """silu(gate) x up in few instructions, which would otherwise take as long as the loads."""
    # A root takes fewer than a division. The bound keeps the power finite; a gate that it changes
    # is closed: the result is below 1e-37 times gate and up.
    root = tl.rsqrt(1.0 + tl.exp2(tl.minimum(gate * -LOG2_E, 126.0)))
    return gate * up * (root * root)


@triton.jit
def place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """A tile's place: GROUP tiles of rows go through all columns before the next ones.

    So programs that run at once share operands.
    """
    first = tile // (GROUP * column_tiles) * GROUP
    rows = tl.minimum(row_tiles - first, GROUP)
    within = tile % (GROUP * column_tiles)
    return first + within % rows, within // rows


@triton.jit(
    do_not_specialize=("tokens",),
    do_not_specialize_on_alignment=("gate_bias_ptr", "up_bias_ptr"),  # halves of one, for instance
)
def aligned_operands_kernel(
    x_desc,  # [tokens, HIDDEN]
    weight_desc,  # [2, WIDTH, HIDDEN], of gate and of up; of up and of gate if these are SWAPPED
    hidden_desc,  # [tokens, STORED]
    gate_bias_ptr, up_bias_ptr,  # [WIDTH] each
    weight_ptr,  # [ROWS, WIDTH]
    stored_ptr,  # [ROWS, STORED]
    tokens,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, ROWS: tl.constexpr,
    # rows and columns of a tile, channels at a time, tiles of rows in a group
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    # rows of the weight at a time, and the power of two that holds STORED
    COPIED: tl.constexpr, COLUMNS: tl.constexpr,
    SWAPPED: tl.constexpr,
):  # fmt: skip
    """silu(gate) x up, and a copy of the weight, with rows filled up with zeros.

    Persistent: one program for each multiprocessor, which copies its part of the weight and goes
    through tiles of the result. Descriptors give zeros beyond a tensor, and store nothing there.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    for first in range(tl.program_id(0) * COPIED, ROWS, tl.num_programs(0) * COPIED):
        row = first + tl.arange(0, COPIED)[:, None]
        inside = (row < ROWS) & (column < WIDTH)
        weight = tl.load(weight_ptr + row * WIDTH + column, mask=inside, other=0.0)
        tl.store(stored_ptr + row * STORED + column, weight, mask=(row < ROWS) & (column < STORED))

    row_tiles, column_tiles = tl.cdiv(tokens, BLOCK), tl.cdiv(STORED, BLOCK)
    # Flattened, the two loops load a tile's first channels while the last one is activated.
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True
    ):
        row_tile, column_tile = place(tile, row_tiles, column_tiles, GROUP)
        row, first = row_tile * BLOCK, column_tile * BLOCK
        acc = tl.zeros([BLOCK, 2 * BLOCK], tl.float32)
        for step in range(0, tl.cdiv(HIDDEN, DEPTH)):
            x = x_desc.load([row, step * DEPTH])
            w = weight_desc.load([0, first, step * DEPTH]).reshape(2 * BLOCK, DEPTH)
            acc = dot(x, tl.trans(w), acc)  # one product of both is faster than two
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK, 2, BLOCK]), [0, 2, 1]))
        if SWAPPED:
            gate, up = up, gate

        columns = first + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        gate += tl.load(gate_bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(up_bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        # 0 x sigmoid(0) x 0 beyond WIDTH
        hidden_desc.store([row, first], cast(silu_times(gate, up), hidden_desc.dtype))
