"""Loading a segment's rows as tiles, embedded on the way: what the kernels have in common.

A tile's sides are powers of two, a head's width need not be: head_dim is cut into a main tile and
a tail tile (80 = 64 + 16) so that no product is padded where splitting can avoid it. Heads that no
tile holds are cut into chunks of one width, whose first column a loop counts.

What is done to a tile of Q or K is named by EMBED: ROPE rotates it, SINUSOIDAL adds sin and cos of
its angles to it, POSITIONS the same of angles that are computed here; None leaves it as it is.

Rotated tiles hold their columns in pairs, x1 and x2 of one angle side by side (the two halves of
the NeoX form interleaved). Q K^T does not care in which order the columns stand as long as Q and K
agree, and joining the halves this way moves no data between threads. V and the result keep the
caller's order. So do tiles that sin and cos are added to, where an angle's columns are neighbours.

Q and K that rotate_kernel rotated beforehand lie as the tiles are cut: a token's row has the main
tiles of all heads, then all tails. So the rows of a tile fill cache lines, whatever head_dim is.
"""

import triton
import triton.language as tl

# Triton's interpreter multiplies the bit patterns of bf16 operands and truncates where a GPU rounds
# to bf16: dot and cast make up for both.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# What EMBED may be, beside None.
ROPE = tl.constexpr("rope")
SINUSOIDAL = tl.constexpr("sinusoidal")
POSITIONS = tl.constexpr("positions")

# fp32 operands are multiplied as such. (Triton 3.6 takes no string as a parameter's default.)
IEEE = tl.constexpr("ieee")


@triton.jit
def dot(a, b, acc=None, PRECISION: tl.constexpr = IEEE):
    """acc + a b, summed in fp32; fp32 operands are multiplied as such, never as tf32.

    PRECISION "tf32x3": by three products on tensor cores, of parts that add up to 22 bits;
    "bf16x6": by six, of parts that add up to 24.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr = IEEE):
    """acc + a b, of which in fp32 a b is summed by itself.

    One sum through all chunks of a wide head, or all keys, would be rounded as often as it has
    terms. 16-bit operands are rounded more than that.
    """
    if a.dtype != tl.float32:
        return dot(a, b, acc, PRECISION)
    else:
        # The compiler has what is added to a product be where its sum starts: not what it is
        # subtracted from.
        return acc - dot(-a, b, None, PRECISION)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """fp32 x in another dtype, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        # Bits that are left below bf16's would be taken for a number where all above them are 0.
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def segment_bounds(cu_seqlens_ptr, segment, tokens):
    """Start and end of a segment, forced into [0, tokens] whatever cu_seqlens holds."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + segment), 0), tokens)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + segment + 1), start), tokens)
    return start, end


@triton.jit
def padding_bounds(cu_seqlens_ptr, segments, tokens):
    """End of the padding before the first segment, and start of that behind the last."""
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr), 0), tokens)
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + segments), 0), tokens)
    return end, start


@triton.jit
def offsets(rows, stride, columns):
    """Offsets [rows, columns] from a tile's first row: unsigned, so that a thread need only hold
    32 bits of an address whose rest is the same for all.
    """
    return (rows[:, None] * stride + columns[None, :]).to(tl.uint32)


@triton.jit
def sector_shift(x_ptr):
    """By how many columns of 16 bits an aligned head begins behind a sector, 32 bytes of memory.

    That is of its first row: where not all begin alike, in an odd number of heads, either serves.
    """
    return (x_ptr.to(tl.uint64) // 16 % 2).to(tl.int32) * 8


@triton.jit
def tile_columns(FIRST, WIDTH: tl.constexpr, shift=None):
    """Columns FIRST .. FIRST + WIDTH, or `shift` earlier."""
    column = FIRST + tl.arange(0, WIDTH)
    return column if shift is None else column - shift


@triton.jit
def tile_mask(row_mask, column, END: tl.constexpr, LIMIT: tl.constexpr, shift=None):
    """Mask of the rows of row_mask (None: all) and the columns from 0 to LIMIT.

    Without a shift none is below 0, and all are below END.
    """
    mask = tl.full([1, 1], True, tl.int1)  # alone it is none to the compiler
    if row_mask is not None:
        mask = row_mask[:, None]
    if END > LIMIT or shift is not None:
        mask = mask & (column < LIMIT)[None, :]
    if shift is not None:
        mask = mask & (column >= 0)[None, :]
    return mask


@triton.jit
def load_columns(x_ptr, stride, rows, row_mask, FIRST, WIDTH: tl.constexpr,
                 HEAD_DIM: tl.constexpr, shift=None, END: tl.constexpr = None):  # fmt: skip
    """Columns FIRST .. FIRST + WIDTH of some rows, or `shift` earlier; zero where masked or beyond
    the head. END, where FIRST is counted by a loop: the end of its last tile.
    """
    column = tile_columns(FIRST, WIDTH, shift)
    end: tl.constexpr = FIRST + WIDTH if END is None else END
    mask = tile_mask(row_mask, column, end, HEAD_DIM, shift)
    return tl.load(x_ptr + offsets(rows, stride, column), mask=mask, other=0.0)


@triton.jit
def store_columns(x_ptr, stride, rows, row_mask, x, FIRST, WIDTH: tl.constexpr,
                  HEAD_DIM: tl.constexpr, shift=None, END: tl.constexpr = None):  # fmt: skip
    """The inverse of load_columns."""
    column = tile_columns(FIRST, WIDTH, shift)
    end: tl.constexpr = FIRST + WIDTH if END is None else END
    mask = tile_mask(row_mask, column, end, HEAD_DIM, shift)
    tl.store(x_ptr + offsets(rows, stride, column), x, mask=mask)


@triton.jit
def pair_columns(FIRST, PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr,
                 ROTARY_DIM: tl.constexpr):  # fmt: skip
    """The pairs FIRST .. FIRST + PAIRS, their first column, and how far behind it the second is."""
    pair = tile_columns(FIRST, PAIRS)
    first, distance = places_of(pair, HEAD_DIM, ROTARY_DIM)
    return pair, first, distance


@triton.jit
def places_of(pair, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """The first column of pairs, and how far behind it the second is.

    Rotary pairs are (i, i + rotary_dim / 2). The dims that pass unrotated form pairs of the same
    kind behind them, so that one code serves both: their angle is 0.
    """
    if ROTARY_DIM == HEAD_DIM:
        first = pair
        distance = HEAD_DIM // 2
    else:
        rotary = pair < ROTARY_DIM // 2
        first = tl.where(rotary, pair, pair + ROTARY_DIM // 2)
        distance = tl.where(rotary, ROTARY_DIM // 2, (HEAD_DIM - ROTARY_DIM) // 2)[None, :]
    return first, distance


@triton.jit
def angles_from(cos_ptr, sin_ptr, offset, EMBED: tl.constexpr = ROPE):
    """Where the angles begin, so many elements behind these; the steps serve all positions."""
    if EMBED == POSITIONS:
        return cos_ptr + offset, sin_ptr
    else:
        return cos_ptr + offset, sin_ptr + offset


@triton.jit
def load_angles(cos_ptr, sin_ptr, stride, rows, row_mask, FIRST,
                WIDTH: tl.constexpr, ROTARY_DIM: tl.constexpr,
                EMBED: tl.constexpr = ROPE, END: tl.constexpr = None):  # fmt: skip
    """Cos and sin [rows, WIDTH / 2] for the embedded tile of columns FIRST .. FIRST + WIDTH.

    Of POSITIONS cos_ptr are the rows' positions, and sin_ptr the angles' steps (see
    `frequency_steps`). END: as in load_columns.
    """
    pair = tile_columns(FIRST // 2, WIDTH // 2)
    end: tl.constexpr = FIRST + WIDTH if END is None else END
    if EMBED is None:
        return 0.0, 0.0
    elif EMBED == POSITIONS:
        mask = tile_mask(None, pair, end // 2, ROTARY_DIM // 2)
        step = tl.load(sin_ptr + pair[None, :], mask=mask, other=0)
        rest = tl.load(sin_ptr + ROTARY_DIM // 2 + pair[None, :], mask=mask, other=0)
        row = rows[:, None]
        position = tl.load(
            cos_ptr + (row * stride).to(tl.uint32), mask=tile_mask(row_mask, pair, 0, 0), other=0
        )
        return cos_and_sin(position, step, rest, mask)
    else:
        mask = tile_mask(row_mask, pair, end // 2, ROTARY_DIM // 2)
        angles = offsets(rows, stride, pair)
        # Columns behind those with angles pass as they are.
        cos = tl.load(cos_ptr + angles, mask=mask, other=1.0 if EMBED == ROPE else 0.0)
        sin = tl.load(sin_ptr + angles, mask=mask, other=0.0)
        # The twin has no callers whose angles are rounded.
        return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def cos_and_sin(position, step, rest, mask):
    """Of position x frequency, 0 where masked; NaN where a position is negative.

    A step is the frequency in turns times 2^32, of which whole turns overflow and are gone; the
    rest that rounding took from it is in 2^-56 turns. So angles are exact to 2^-24 turns at any
    position. Of their distance to a quarter turn short polynomials give both to 2e-7, without a
    branch for large arguments, as libraries' functions have.
    """
    turns = (position * step).to(tl.float32) * 2.0**-32
    turns += position.to(tl.float32) * (rest.to(tl.float32) * 2.0**-56)
    turns = tl.where(position < 0, float("nan"), turns)
    quarter = tl.floor(turns * 4.0 + 0.5)
    x = (turns - quarter * 0.25) * 6.283185307179586
    x2 = x * x
    sin = x + x * x2 * (-1 / 6 + x2 * (1 / 120 + x2 * (-1 / 5040 + x2 * (1 / 362880))))
    cos = 1.0 + x2 * (-0.5 + x2 * (1 / 24 + x2 * (-1 / 720 + x2 * (1 / 40320))))
    sign = tl.where(tl.abs(quarter) == 2.0, -1.0, 1.0)
    is_odd = tl.abs(quarter) == 1.0
    first = tl.where(is_odd, -quarter * sin, sign * cos)
    second = tl.where(is_odd, quarter * cos, sign * sin)
    return tl.where(mask, first, 0.0), tl.where(mask, second, 0.0)


@triton.jit
def load_pairs(x_ptr, stride, rows, row_mask, FIRST, WIDTH: tl.constexpr,
               HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
               END: tl.constexpr = None):  # fmt: skip
    """The two halves [rows, WIDTH / 2] of columns FIRST .. FIRST + WIDTH in paired order.

    END: as in load_columns.
    """
    pair, first, distance = pair_columns(FIRST // 2, WIDTH // 2, HEAD_DIM, ROTARY_DIM)
    end: tl.constexpr = FIRST + WIDTH if END is None else END
    mask = tile_mask(row_mask, pair, end // 2, HEAD_DIM // 2)
    ptr = x_ptr + offsets(rows, stride, first)
    x1 = tl.load(ptr, mask=mask, other=0.0)
    x2 = tl.load(ptr + distance, mask=mask, other=0.0)
    return x1, x2


@triton.jit
def store_pairs(x_ptr, stride, rows, row_mask, x, FIRST: tl.constexpr, WIDTH: tl.constexpr,
                HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):  # fmt: skip
    """The inverse of load_pairs."""
    pair, first, distance = pair_columns(FIRST // 2, WIDTH // 2, HEAD_DIM, ROTARY_DIM)
    mask = tile_mask(row_mask, pair, (FIRST + WIDTH) // 2, HEAD_DIM // 2)
    ptr = x_ptr + offsets(rows, stride, first)
    tl.store(ptr, x[0], mask=mask)
    tl.store(ptr + distance, x[1], mask=mask)


@triton.jit
def rotate_pairs(x, cos, sin):
    """Both halves rotated in fp32: x1 c - x2 s, x2 c + x1 s."""
    x1, x2 = x[0].to(tl.float32), x[1].to(tl.float32)
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def inverse_rms(x, tail, EPS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """1 / RMS [rows, 1] of a head's rows, of the halves of its main and its tail tile (or None).

    EPS is added to the mean square; None: the head is not normalised, and a number stands in.
    """
    if EPS is None:
        return 1.0
    else:
        squares = sum_of_squares(x)
        if tail is not None:
            squares += sum_of_squares(tail)
        return tl.rsqrt(squares / HEAD_DIM + EPS)[:, None]


@triton.jit
def sum_of_squares(x):
    x1, x2 = x[0].to(tl.float32), x[1].to(tl.float32)
    return tl.sum(x1 * x1 + x2 * x2, 1)


@triton.jit
def load_inverse_rms(x_ptr, stride, rows, row_mask, EPS: tl.constexpr, MAIN: tl.constexpr,
                     TAIL: tl.constexpr, HEAD_DIM: tl.constexpr,
                     ROTARY_DIM: tl.constexpr):  # fmt: skip
    """inverse_rms of a head whose tiles are loaded one by one: again, from the cache."""
    if EPS is None:
        return 1.0
    else:
        x = load_pairs(x_ptr, stride, rows, row_mask, 0, MAIN, HEAD_DIM, ROTARY_DIM)
        tail = None
        if TAIL > 0:
            tail = load_pairs(x_ptr, stride, rows, row_mask, MAIN, TAIL, HEAD_DIM, ROTARY_DIM)
        return inverse_rms(x, tail, EPS, HEAD_DIM)


@triton.jit
def normalized(x, inverse, weight_ptr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
               HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):  # fmt: skip
    """The halves of columns FIRST .. FIRST + WIDTH by the inverse RMS and weights, in fp32; as they
    are where there are none.
    """
    if weight_ptr is None:
        return x
    else:
        pair, first, distance = pair_columns(FIRST // 2, WIDTH // 2, HEAD_DIM, ROTARY_DIM)
        mask = tile_mask(None, pair, (FIRST + WIDTH) // 2, HEAD_DIM // 2)
        ptr = weight_ptr + first[None, :]
        w1 = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
        w2 = tl.load(ptr + distance, mask=mask, other=0.0).to(tl.float32)
        return x[0].to(tl.float32) * inverse * w1, x[1].to(tl.float32) * inverse * w2


@triton.jit
def rotated_columns(head, heads, FIRST, WIDTH: tl.constexpr):
    """Where in a row of rotated heads a head's tile of columns FIRST .. FIRST + WIDTH stands."""
    return FIRST * heads + head * WIDTH + tl.arange(0, WIDTH)


@triton.jit
def store_rotated(x_ptr, stride, rows, row_mask, x, head, heads, FIRST,
                  WIDTH: tl.constexpr):  # fmt: skip
    """Write the rotated tile of columns FIRST .. FIRST + WIDTH where load_rotary finds it."""
    columns = rotated_columns(head, heads, FIRST, WIDTH)
    mask = tile_mask(row_mask, columns, 0, 0)
    tl.store(x_ptr + offsets(rows, stride, columns), x, mask=mask)


@triton.jit
def load_rotary(x_ptr, stride, rows, row_mask, head, FIRST, WIDTH: tl.constexpr,
                HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
                EMBED: tl.constexpr, END: tl.constexpr = None):  # fmt: skip
    """What embedded_tile takes: the halves of what is rotated, the columns of what is added to; of
    what rotate_kernel has embedded the tile that it wrote.

    x_ptr is where the head starts, but where the row does if it is embedded: its head stride is 0.
    END: as in load_columns.
    """
    if EMBED is None:
        columns = rotated_columns(head, HEADS, FIRST, WIDTH)
        mask = tile_mask(row_mask, columns, 0, 0)
        return tl.load(x_ptr + offsets(rows, stride, columns), mask=mask, other=0.0)
    elif EMBED == ROPE:
        return load_pairs(x_ptr, stride, rows, row_mask, FIRST, WIDTH, HEAD_DIM, ROTARY_DIM, END)
    else:
        return load_columns(x_ptr, stride, rows, row_mask, FIRST, WIDTH, HEAD_DIM, None, END)


@triton.jit
def embedded_tile(x, cos, sin, EMBED: tl.constexpr, DTYPE: tl.constexpr = None):
    """A tile of Q or K with its embedding, in fp32; then of DTYPE, or of that of what it was."""
    if EMBED is None:
        return x
    elif EMBED == ROPE:
        y1, y2 = rotate_pairs(x, cos, sin)
        # Rounded last: of joined tiles Triton 3.6 makes no product where rotary_dim / 2 is odd.
        return cast(tl.interleave(y1, y2), x[0].dtype if DTYPE is None else DTYPE)
    else:
        # PE(pos, 2i) = sin(pos / 10000^(2i / head_dim)), PE(pos, 2i + 1) = cos of the same
        # (Vaswani et al., Attention Is All You Need, 2017).
        y = x.to(tl.float32) + tl.interleave(sin, cos)
        return cast(y, x.dtype if DTYPE is None else DTYPE)


@triton.jit
def rotate_back(y, cos, sin, dtype: tl.constexpr):
    """The two halves of a tile in paired order, by the opposite angles: what a gradient of
    embedded_tile's result is to its argument. fp32 y; the halves are of dtype.
    """
    pairs = tl.split(tl.reshape(y, [y.shape[0], y.shape[1] // 2, 2]))
    x1, x2 = rotate_pairs(pairs, cos, -sin)
    return cast(x1, dtype), cast(x2, dtype)
