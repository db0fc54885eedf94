"""Loading a segment's rows as tiles, embedded on the way: what the kernels have in common.

A tile's sides are powers of two, a head's width need not be: head_dim is cut into a main tile and
a tail tile (80 = 64 + 16) so that no product is padded where splitting can avoid it. Heads that no
tile holds are cut into chunks of one width, whose first column a loop counts.

What is done to a tile of Q or K is named by `embed`: ROPE rotates it, SINUSOIDAL adds sin and cos
of its angles to it, POSITIONS the same of angles that are computed here; None leaves it as it is.

Rotated tiles hold their columns in pairs, x1 and x2 of one angle side by side (the two halves of
the NeoX form interleaved). Q K^T does not care in which order the columns stand as long as Q and K
agree, and joining the halves this way moves no data between threads. V and the result keep the
caller's order. So do tiles that sin and cos are added to, where an angle's columns are neighbours.

Q and K that rotate_kernel rotated beforehand lie as the tiles are cut: a token's row has the main
tiles of all heads, then all tails. So the rows of a tile fill cache lines, whatever head_dim is.

This is the file that speaks Pallas' Triton dialect; q, k and v are refs of four axes,
[tokens, parts, heads, head_dim], of which a kernel reads one part and one head. Rotated ones are
[tokens, parts, row].
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.checks import EMBEDDINGS
from pallas_kernels.kernels.dialect import plgpu
from pallas_kernels.sinusoidal import cos_and_sin

Ref = Any
Scalar = Any
Pair = tuple[jax.Array, jax.Array]
# None, or one of these: what is done to a tile.
Embedding = str | None
ROPE, SINUSOIDAL, POSITIONS = EMBEDDINGS
# Products of fp32 by several of fewer bits, see dot.
_IN_PARTS = {
    "tf32x3": jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "bf16x6": jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
}


class Head(NamedTuple):
    """One head of one part of a [tokens, parts, heads, head_dim] ref."""

    ref: Ref
    part: Scalar
    head: Scalar


class Rotated(NamedTuple):
    """One of so many heads of one part of a [tokens, parts, row] ref, which rotate_kernel wrote."""

    ref: Ref
    part: Scalar
    head: Scalar
    heads: int


class Norm(NamedTuple):
    """RMSNorm of heads: the weights, a [head_dim] ref, or two, of a part each; which part; and what
    is added to a head's mean square.
    """

    weights: tuple[Ref, ...]
    part: Scalar
    eps: float


class Rows(NamedTuple):
    """The rows of a tile.

    Attributes:
        first: the first row.
        count: how many there are.
        mask: [count], which of them are loaded or stored; None: all.
        last: counted from the first, the row that all behind it are again; None: none are.
    """

    first: Scalar
    count: int
    mask: jax.Array | None
    last: Scalar | None = None


def dot(
    a: jax.Array, b: jax.Array, acc: jax.Array | None = None, precision: str = "ieee"
) -> jax.Array:
    """acc + a b, summed in fp32; fp32 operands are multiplied as such, never as tf32.

    precision "tf32x3": by three products on tensor cores, of parts that add up to 22 bits;
    "bf16x6": by six, of parts that add up to 24.
    """
    # Never None, which would be whatever the program around the call has products be.
    is_single = a.dtype == jnp.float32
    how = jax.lax.Precision.HIGHEST if is_single else jax.lax.Precision.DEFAULT
    if is_single and precision != "ieee":
        how = _IN_PARTS[precision]
    product = jnp.dot(a, b, precision=how, preferred_element_type=jnp.float32)
    return product if acc is None else acc + product


def add_product(acc: jax.Array, a: jax.Array, b: jax.Array, precision: str = "ieee") -> jax.Array:
    """acc + a b, of which in fp32 a b is summed by itself.

    One sum through all chunks of a wide head, or all keys, would be rounded as often as it has
    terms. 16-bit operands are rounded more than that.
    """
    if a.dtype != jnp.float32:
        return dot(a, b, acc, precision)
    # The compiler has what is added to a product be where its sum starts: not what it is subtracted
    # from.
    return acc - dot(-a, b, None, precision)


def exp2(x: jax.Array, interpreted: bool) -> jax.Array:
    """2 ** x by one instruction, which flushes results below 2 ** -126 to 0.

    jnp.exp2 is compiled to three more instructions, for those.
    """
    if interpreted:
        return jnp.exp2(x)
    [result] = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return result


def barrier(interpreted: bool) -> None:
    """Have the threads of a program wait for each other; the interpreter has only one."""
    if not interpreted:
        plgpu.debug_barrier()


def segment_bounds(cu_seqlens_ref: Ref, segment: Scalar, tokens: int) -> tuple[Scalar, Scalar]:
    """Start and end of a segment, forced into [0, tokens] whatever cu_seqlens holds."""
    start = jnp.clip(cu_seqlens_ref[segment], 0, tokens)
    end = jnp.clip(cu_seqlens_ref[segment + 1], start, tokens)
    return start, end


def padding_bounds(cu_seqlens_ref: Ref, segments: int, tokens: int) -> tuple[Scalar, Scalar]:
    """End of the padding before the first segment, and start of that behind the last."""
    return jnp.clip(cu_seqlens_ref[0], 0, tokens), jnp.clip(cu_seqlens_ref[segments], 0, tokens)


def _window(x: Head | Rotated | Ref, rows: Rows, columns: pl.Slice | jax.Array) -> Ref:
    """The part of a ref that a tile covers; columns are a slice, or a vector of indices."""
    ref, prefix = x, ()
    if isinstance(x, Head):
        ref, prefix = x.ref, (jnp.int32(x.part), x.head)
    elif isinstance(x, Rotated):
        ref, prefix = x.ref, (jnp.int32(x.part),)
    if isinstance(columns, pl.Slice):
        if rows.last is None:
            return ref.at[pl.ds(rows.first, rows.count), *prefix, columns]
        columns = columns.start + jnp.arange(columns.size, dtype=jnp.int32)
    shape = (rows.count, columns.shape[0])
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    if rows.last is not None:
        row = jnp.minimum(row, rows.last)
    return ref.at[row + rows.first, *prefix, jnp.broadcast_to(columns[None, :], shape)]


def _row_window(x_ref: Ref, rows: Rows) -> Ref:
    """The part of a [tokens] ref that a tile's rows cover."""
    if rows.last is None:
        return x_ref.at[pl.ds(rows.first, rows.count)]
    row = jnp.minimum(jnp.arange(rows.count, dtype=jnp.int32), rows.last)
    return x_ref.at[row + rows.first]


def tile_columns(
    first: Scalar, width: int, limit: int, shift: Scalar | None = None, end: int | None = None
) -> tuple[pl.Slice | jax.Array, jax.Array | None]:
    """Columns first .. first + width, or `shift` earlier, and the mask of those in 0 .. limit.

    The mask is None where all are. end: where `first` is counted by a loop, the end of its last
    tile.
    """
    if shift is None and (first + width if end is None else end) <= limit:
        return pl.ds(first, width), None
    column = first + jnp.arange(width, dtype=jnp.int32)
    if shift is None:
        return column, column < limit
    column -= shift
    return column, (column < limit) & (column >= 0)


def tile_mask(rows: Rows, column_mask: jax.Array | None) -> jax.Array | None:
    """Mask of the rows and columns that are loaded or stored; None: all."""
    if column_mask is None:
        return None if rows.mask is None else rows.mask[:, None]
    return column_mask[None, :] if rows.mask is None else rows.mask[:, None] & column_mask[None, :]


def _load(window: Ref, mask: jax.Array | None, other: float) -> jax.Array:
    return plgpu.load(window, mask=mask, other=None if mask is None else other)


def sector_shift(x: Head) -> Scalar:
    """By how many columns of 16 bits an aligned head begins behind a sector, 32 bytes of memory.

    That is of its first row: where not all begin alike, in an odd number of heads, either serves.
    """
    _, _, heads, head_dim = x.ref.shape
    return (x.part * heads + x.head) * (head_dim // 8) % 2 * 8


def load_columns(
    x: Head, rows: Rows, first: Scalar, width: int, head_dim: int, shift: Scalar | None = None,
    end: int | None = None,
) -> jax.Array:  # fmt: skip
    """Columns first .. first + width of some rows, or `shift` earlier; zero where masked or beyond
    the head. end: where `first` is counted by a loop, the end of its last tile.
    """
    columns, column_mask = tile_columns(first, width, head_dim, shift, end)
    return _load(_window(x, rows, columns), tile_mask(rows, column_mask), 0.0)


def store_columns(
    x: Head, rows: Rows, tile: jax.Array, first: Scalar, width: int, head_dim: int,
    shift: Scalar | None = None, end: int | None = None,
) -> None:  # fmt: skip
    """The inverse of load_columns."""
    columns, column_mask = tile_columns(first, width, head_dim, shift, end)
    plgpu.store(_window(x, rows, columns), tile, mask=tile_mask(rows, column_mask))


def _half(first: Scalar) -> Scalar:
    """Of a column, which is at least 0: `//` would tell the compiler less of its divisors."""
    return first // 2 if isinstance(first, int) else jax.lax.div(first, jnp.int32(2))


def store_partial(x_ref: Ref, pair: Scalar, split: Scalar, logits: jax.Array) -> None:
    """Write a tile [block, block] to a [pairs, splits, block, block] ref."""
    plgpu.store(x_ref.at[pair, split], logits)


def load_partial(x_ref: Ref, pair: Scalar, split: Scalar, first_row: Scalar,
                 rows: int) -> jax.Array:  # fmt: skip
    """Some rows [rows, block] of a tile that store_partial wrote."""
    return plgpu.load(x_ref.at[pair, split, pl.ds(first_row, rows), pl.ds(0, x_ref.shape[-1])])


def load_numbers(x_ref: Ref, head: Scalar, rows: Rows, other: float) -> jax.Array:
    """A number for each row, of a [heads, tokens] ref; another where masked."""
    return _load(x_ref.at[head, pl.ds(rows.first, rows.count)], rows.mask, other)


def store_numbers(x_ref: Ref, head: Scalar, rows: Rows, numbers: jax.Array) -> None:
    """The inverse of load_numbers."""
    plgpu.store(x_ref.at[head, pl.ds(rows.first, rows.count)], numbers, mask=rows.mask)


def pair_columns(
    first: Scalar, width: int, head_dim: int, rotary_dim: int, end: int | None = None
) -> tuple[pl.Slice | jax.Array, pl.Slice | jax.Array, jax.Array | None]:
    """The two columns of each pair first .. first + width, and the mask of the pairs that exist.

    Rotary pairs are (i, i + rotary_dim / 2). The dims that pass unrotated form pairs of the same
    kind behind them, so that one code serves both: their angle is 0. end: of the last tile, where
    `first` is counted by a loop.
    """
    whole = (first + width if end is None else end) <= head_dim // 2
    if rotary_dim == head_dim and whole:
        return pl.ds(first, width), pl.ds(first + head_dim // 2, width), None
    pair = first + jnp.arange(width, dtype=jnp.int32)
    if rotary_dim == head_dim:
        column, partner = pair, pair + head_dim // 2
    else:
        rotary = pair < rotary_dim // 2
        column = jnp.where(rotary, pair, pair + rotary_dim // 2)
        partner = column + jnp.where(rotary, rotary_dim // 2, (head_dim - rotary_dim) // 2)
    return column, partner, pair < head_dim // 2


def rotary_dim_of(cos_ref: Ref, head_dim: int) -> int:
    """Columns of a head that have angles: all, if positions stand in place of cos."""
    return 2 * cos_ref.shape[1] if len(cos_ref.shape) == 2 else head_dim


def load_angles(
    cos_ref: Ref, sin_ref: Ref, rows: Rows, first: Scalar, width: int, rotary_dim: int,
    embed: Embedding = ROPE, end: int | None = None,
) -> tuple[jax.Array | None, jax.Array | None]:  # fmt: skip
    """cos and sin [rows, width / 2] for the embedded tile of columns first .. first + width.

    Of POSITIONS cos_ref holds the rows' positions, and sin_ref the angles' steps (see
    `frequency_steps`). end: as in load_columns.
    """
    if embed is None:
        return None, None
    half_end = None if end is None else end // 2
    columns, column_mask = tile_columns(_half(first), width // 2, rotary_dim // 2, end=half_end)
    if embed == POSITIONS:
        rows_of_steps = (sin_ref.at[jnp.int32(i), columns] for i in range(2))
        step, rest = (_load(x, column_mask, 0)[None, :] for x in rows_of_steps)
        position = _load(_row_window(cos_ref, rows), rows.mask, 0)[:, None]
        cos, sin = cos_and_sin(position, step, rest)
        if column_mask is not None:
            cos, sin = (jnp.where(column_mask[None, :], x, 0.0) for x in (cos, sin))
        return cos, sin
    mask = tile_mask(rows, column_mask)
    # Columns behind those with angles pass as they are.
    cos = _load(_window(cos_ref, rows, columns), mask, 1.0 if embed == ROPE else 0.0)
    sin = _load(_window(sin_ref, rows, columns), mask, 0.0)
    return cos, sin


def load_pairs(x: Head, rows: Rows, first: Scalar, width: int, head_dim: int, rotary_dim: int,
               end: int | None = None) -> Pair:  # fmt: skip
    """The two halves [rows, width / 2] of columns first .. first + width in paired order.

    end: as in load_columns.
    """
    half_end = None if end is None else end // 2
    columns = _half(first), width // 2
    column, partner, column_mask = pair_columns(*columns, head_dim, rotary_dim, half_end)
    mask = tile_mask(rows, column_mask)
    x1 = _load(_window(x, rows, column), mask, 0.0)
    x2 = _load(_window(x, rows, partner), mask, 0.0)
    return x1, x2


def store_pairs(x: Head, rows: Rows, tile: Pair, first: int, width: int,
                head_dim: int, rotary_dim: int) -> None:  # fmt: skip
    """The inverse of load_pairs."""
    column, partner, column_mask = pair_columns(_half(first), width // 2, head_dim, rotary_dim)
    mask = tile_mask(rows, column_mask)
    plgpu.store(_window(x, rows, column), tile[0], mask=mask)
    plgpu.store(_window(x, rows, partner), tile[1], mask=mask)


def rotate_pairs(x: Pair, cos: jax.Array, sin: jax.Array) -> Pair:
    """Both halves rotated in fp32: x1 c - x2 s, x2 c + x1 s."""
    x1, x2 = x[0].astype(jnp.float32), x[1].astype(jnp.float32)
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


def inverse_rms(
    x: Pair | jax.Array, tail: Pair | jax.Array | None, norm: Norm | None, head_dim: int
) -> jax.Array | None:
    """1 / RMS [rows, 1] of a head's rows, of the halves of its main and its tail tile (or None).

    None where there is no norm.
    """
    if norm is None:
        return None
    squares = sum_of_squares(x)
    if tail is not None:
        squares += sum_of_squares(tail)
    return jax.lax.rsqrt(squares / head_dim + norm.eps)[:, None]


def sum_of_squares(x: Pair) -> jax.Array:
    x1, x2 = x[0].astype(jnp.float32), x[1].astype(jnp.float32)
    return jnp.sum(x1 * x1 + x2 * x2, axis=1)


def load_inverse_rms(x: Head, rows: Rows, norm: Norm | None, main: int, tail: int, head_dim: int,
                     rotary_dim: int) -> jax.Array | None:  # fmt: skip
    """inverse_rms of a head whose tiles are loaded one by one: again, from the cache."""
    if norm is None:
        return None
    pairs = load_pairs(x, rows, 0, main, head_dim, rotary_dim)
    tail_pairs = load_pairs(x, rows, main, tail, head_dim, rotary_dim) if tail > 0 else None
    return inverse_rms(pairs, tail_pairs, norm, head_dim)


def normalized(x: Pair | jax.Array, inverse: jax.Array | None, norm: Norm | None,
               first: int, width: int, head_dim: int,
               rotary_dim: int) -> Pair | jax.Array:  # fmt: skip
    """The halves of columns first .. first + width by the inverse RMS and weights, in fp32; as they
    are where there are none.
    """
    if norm is None:
        return x
    *columns, mask = pair_columns(_half(first), width // 2, head_dim, rotary_dim)

    def weight(column: pl.Slice | jax.Array) -> jax.Array:
        loaded, *second = (_load(ref.at[column], mask, 0.0) for ref in norm.weights)
        if second:
            loaded = jnp.where(norm.part == 0, loaded, *second)
        return loaded.astype(jnp.float32)

    return tuple(
        half.astype(jnp.float32) * inverse * weight(column)
        for half, column in zip(x, columns, strict=True)
    )


def interleave(y1: jax.Array, y2: jax.Array) -> jax.Array:
    """[rows, n] twice -> [rows, 2 n], columns in pairs."""
    return jnp.stack([y1, y2], axis=-1).reshape(y1.shape[0], 2 * y1.shape[1])


def rotated_columns(x: Rotated, first: int, width: int) -> pl.Slice:
    """Where in a row of rotated heads a head's tile of columns first .. first + width stands."""
    return pl.ds(first * x.heads + x.head * width, width)


def store_rotated(x: Rotated, rows: Rows, tile: jax.Array, first: int, width: int) -> None:
    """Write the rotated tile of columns first .. first + width where load_rotary finds it."""
    columns = rotated_columns(x, first, width)
    plgpu.store(_window(x, rows, columns), tile, mask=tile_mask(rows, None))


def rotary_head(ref: Ref, part: int, head: Scalar, heads: int, embed: Embedding) -> Head | Rotated:
    """What load_rotary takes: a head of the caller's if it is to be embedded, else one that is.

    Embedded ones of wide heads have four axes, too.
    """
    is_row = embed is None and len(ref.shape) == 3
    return Rotated(ref, part, head, heads) if is_row else Head(ref, part, head)


def load_rotary(x: Head | Rotated, rows: Rows, first: Scalar, width: int, rotary_dim: int,
                embed: Embedding, end: int | None = None) -> Pair | jax.Array:  # fmt: skip
    """What embedded_tile takes: the halves of what is rotated, the columns of what is added to; of
    what rotate_kernel has embedded the tile that it wrote. end: as in load_columns.
    """
    if isinstance(x, Rotated):
        columns = rotated_columns(x, first, width)
        return _load(_window(x, rows, columns), tile_mask(rows, None), 0.0)
    head_dim = x.ref.shape[-1]
    if embed == ROPE:
        return load_pairs(x, rows, first, width, head_dim, rotary_dim, end)
    return load_columns(x, rows, first, width, head_dim, end=end)


def embedded_tile(x: Pair | jax.Array, cos: jax.Array | None, sin: jax.Array | None,
                  embed: Embedding, dtype: DTypeLike | None = None) -> jax.Array:  # fmt: skip
    """A tile of Q or K with its embedding, in fp32; then of a dtype, or of that of what it was."""
    if embed is None:
        return x
    if embed == ROPE:
        y1, y2 = rotate_pairs(x, cos, sin)
        # Rounded last: of joined tiles Triton 3.6 makes no product where rotary_dim / 2 is odd.
        return interleave(y1, y2).astype(dtype or x[0].dtype)
    # PE(pos, 2i) = sin(pos / 10000^(2i / head_dim)), PE(pos, 2i + 1) = cos of the same
    # (Vaswani et al., Attention Is All You Need, 2017).
    return (x.astype(jnp.float32) + interleave(sin, cos)).astype(dtype or x.dtype)


def rotate_back(y: jax.Array, cos: jax.Array, sin: jax.Array, dtype: DTypeLike) -> Pair:
    """The two halves of a tile in paired order, by the opposite angles: what a gradient of
    embedded_tile's result is to its argument. fp32 y; the halves are of dtype.
    """
    rows, width = y.shape
    halves = jax.lax.split(y.reshape(rows, width // 2, 2), (1, 1), axis=2)
    x1, x2 = rotate_pairs(tuple(half.reshape(rows, width // 2) for half in halves), cos, -sin)
    return x1.astype(dtype), x2.astype(dtype)
