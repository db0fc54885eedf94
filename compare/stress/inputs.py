"""Inputs of the stress checks: random, hostile, and with extreme numbers; how much is tried."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compare.workloads.kernels import DTYPES, KernelInputs


@dataclass(frozen=True)
class Route:
    """Calls of one kind: from their size follows which kernel serves them, if all is rotated.

    Attributes:
        name: of the kernel that is meant, as findings have it.
        max_seqlen: the bound on a segment's length that is passed.
        heads: so many.
        lengths: of the segments, none longer than the bound.
        head_dim: None: that of everything, see `Sizes`.
    """

    name: str
    max_seqlen: int
    heads: int
    lengths: tuple[int, ...]
    head_dim: int | None = None


# Bounds that lead to the window kernel and past it, in every dtype.
WINDOW, STREAM = 32, 4096
_SHORT = Route("window", WINDOW, 4, (32, 0, 1, 31, 16, 5))
_LONG = (32, 0, 1, 150, 16, 5)
# Two blocks of 128 tokens of so many heads fill the multiprocessors of a Hopper GPU, which is what
# its warp-specialized kernel wants, and a bound of 768.
_MANY = 66


@dataclass(frozen=True)
class Sizes:
    """How much is tried.

    Attributes:
        hostile: hostile cu_seqlens, each in turn on another route and way of fusing.
        runs: repetitions of one call.
        routes: to every kernel; the first to the window kernel.
        head_dim: of everything but the largest, and of routes that have another.
        far_tokens, far_heads: of the packed qkv that is checked at its far end.
        long_segment: tokens of a single segment.
        segments: of a call with very many.
        fuse: the ways of fusing.
        lengths, starts: of a segment that is moved about; the first start is 0.
    """

    hostile: int
    runs: int
    routes: tuple[Route, ...]
    head_dim: int
    far_tokens: int
    far_heads: int
    long_segment: int
    segments: int
    fuse: tuple[str, ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]


ON_GPU = Sizes(
    hostile=6000, runs=50, head_dim=80, far_tokens=600_000, far_heads=16,
    long_segment=131_072, segments=100_000, fuse=("qk", "q", "none"), lengths=(1, 29, 32, 150),
    starts=(0, 1, 7, 16, 33, 63, 64, 65, 97, 128, 200, 250),
    routes=(
        _SHORT,
        replace(_SHORT, max_seqlen=16, lengths=(16, 0, 1, 15, 8, 5)),
        Route("stream", STREAM, 4, _LONG),
        Route("stream", 767, _MANY, _LONG),
        Route("warp-specialized", 768, _MANY, (*_LONG, 4)),  # tokens by eights
        Route("warp-specialized", STREAM, _MANY, _LONG),
        replace(_SHORT, name="wide", head_dim=520),  # the last chunk holds 8 columns
        Route("stream", STREAM, 2, _LONG, head_dim=264),
    ),
)  # fmt: skip
ON_CPU = Sizes(
    hostile=40, runs=2, head_dim=8, far_tokens=320, far_heads=1,
    long_segment=140, segments=40, fuse=("qk", "none"), lengths=(29,), starts=(0, 33, 70),
    routes=(
        Route("window", WINDOW, 1, (32, 0, 1, 7)),
        Route("stream", STREAM, 1, (40, 0, 1, 7)),
        Route("wide", WINDOW, 1, (16, 0, 1, 7), head_dim=264),
    ),
)  # fmt: skip


def draw(
    lengths: np.ndarray | Sequence[int],
    head_dim: int,
    dtype: str = "bfloat16",
    *,
    heads: int = 1,
    padding: int = 0,
    seed: int = 0,
    distinct: int | None = None,
    first: int = 0,
) -> KernelInputs:
    """Random inputs for segments of these lengths.

    Args:
        lengths: tokens of each segment.
        head_dim: of each head.
        dtype: a key of DTYPES.
        heads: so many.
        padding: tokens of no segment, behind the others.
        seed: of everything random.
        distinct: rows that are drawn and then repeated; None: every row is its own.
        first: which of them is the first token's.
    """
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    tokens = int(cu_seqlens[-1]) + padding
    rows = min(tokens, distinct or tokens)
    row = (first + np.arange(tokens)) % max(rows, 1)
    arrays = (x[row] for x in _rows(rows, heads, head_dim, dtype, seed))
    return KernelInputs(*arrays, cu_seqlens, int(np.max(lengths, initial=0)))


def draw_for(
    route: Route, sizes: Sizes, lengths: Sequence[int] | None = None, **options: Any
) -> KernelInputs:
    """Inputs of a route's heads and segments, or of others; options as of `draw`."""
    lengths = route.lengths if lengths is None else lengths
    return draw(lengths, route.head_dim or sizes.head_dim, heads=route.heads, **options)


@functools.lru_cache(maxsize=4)
def _rows(count: int, heads: int, head_dim: int, dtype: str, seed: int) -> tuple[np.ndarray, ...]:
    """Random rows of qkv, cos and sin, drawn once for many calls: nothing takes longer."""
    rng = np.random.default_rng(seed)
    shape = (count, 3, heads, head_dim)
    qkv = rng.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])
    angles = rng.uniform(-8, 8, (count, head_dim // 2))
    return qkv, *(f(angles).astype(np.float32) for f in (np.cos, np.sin))


def hostile_cu_seqlens(rng: np.random.Generator, segments: int, tokens: int) -> np.ndarray:
    """[segments + 1] int32 of any content: around the tensor, across int32, repeated, decreasing.

    Args:
        rng: source of randomness.
        segments: number of segments.
        tokens: rows of the tensors that they should lie in.
    """
    values = rng.integers(-3, tokens + 10, segments + 1)
    anywhere = rng.integers(-(2**31), 2**31, segments + 1)
    extreme = rng.choice([-(2**31), -1, 0, tokens, tokens + 1, 2**31 - 1], segments + 1)
    for others in (anywhere, extreme):
        values = np.where(rng.random(segments + 1) < rng.choice([0, 0.1, 0.4]), others, values)
    if rng.random() < 0.4:
        values = np.sort(values)[:: rng.choice([-1, 1])]
    if rng.random() < 0.2:
        values = np.repeat(values, 2)[: segments + 1]
    return values.astype(np.int32)


def refusable(cu_seqlens: np.ndarray, tokens: int, max_seqlen: int) -> np.ndarray:
    """Mask [tokens] of the rows of segments longer than max_seqlen, which may come out as NaN.

    Args:
        cu_seqlens: [segments + 1] int32 of any content; forced into the tensors as the kernels do.
        tokens: rows of the tensors.
        max_seqlen: the bound that the kernel is given.
    """
    rows = np.zeros(tokens, bool)
    for start, end in itertools.pairwise(np.clip(cu_seqlens, 0, tokens).tolist()):
        if end - start > max_seqlen:
            rows[start:end] = True
    return rows


def contested(cu_seqlens: np.ndarray, tokens: int) -> np.ndarray:
    """Mask [tokens] of the rows between values that decrease, which may be anything, and of the
    segments that they lie in.

    Programs need not agree on the segment of such a row. Its log-sum-exp may be another segment's,
    and its probabilities none.
    """
    bounds = list(itertools.pairwise(np.clip(cu_seqlens, 0, tokens).tolist()))
    between = np.zeros(tokens, bool)
    for start, end in bounds:
        between[end:start] = True
    rows = between.copy()
    for start, end in bounds:
        rows[start:end] |= between[start:end].any()
    return rows


def _unrotated(inputs: KernelInputs, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> KernelInputs:
    """Q, k, v [tokens, heads, head_dim] with angles of 0: logits are the products as written."""
    qkv = np.stack([q, k, v], axis=1).astype(inputs.qkv.dtype)
    return replace(inputs, qkv=qkv, cos=np.ones_like(inputs.cos), sin=np.zeros_like(inputs.sin))


def _parts(inputs: KernelInputs) -> list[np.ndarray]:
    return list(inputs.qkv.astype(np.float32).transpose(1, 0, 2, 3))


def _large_logits(inputs: KernelInputs) -> KernelInputs:
    """All logits near 1e4, their differences those of the random part."""
    q, k, v = _parts(inputs)
    # Multiples of a half: fp32 sums of their products are exact in any order.
    q, k = np.round(2 * q) / 2, np.round(2 * k) / 2
    q[..., 0], k[..., 0] = 256, 4 * round(1e4 / 1024 / q.shape[-1] ** -0.5)
    return _unrotated(inputs, q, k, v)


def _equal_rows(inputs: KernelInputs) -> KernelInputs:
    """Every query and every key is the same row: the result is the mean of v."""
    q, k, v = _parts(inputs)
    q[:], k[:] = q[0], k[0]
    return _unrotated(inputs, q, k, v)


def _dominant_key(inputs: KernelInputs) -> KernelInputs:
    """The first key of each segment outweighs all others by thousands."""
    q, k, v = _parts(inputs)
    q[..., 0], k[..., 0] = 256, 0
    k[inputs.cu_seqlens[:-1], :, 0] = 256
    return _unrotated(inputs, q, k, v)


def _near_overflow(inputs: KernelInputs) -> KernelInputs:
    """Values of v just below fp16's largest, and one key that q and k just below it choose."""
    q, k, v = _parts(inputs)
    v = np.sign(v) * 65504
    q[..., 0], k[..., 0] = 60000, 0
    k[inputs.cu_seqlens[:-1], :, 0] = 60000
    return _unrotated(inputs, q, k, v)


EXTREMES: dict[str, Callable[[KernelInputs], KernelInputs]] = {
    "logits of 1e4": _large_logits,
    "all rows equal": _equal_rows,
    "one dominant key": _dominant_key,
    "near fp16's largest": _near_overflow,
}
