"""Inputs for the kernels and what they should give, in NumPy: an oracle of its own.

Letters as in the kernels' docstrings; a case is one call's arguments.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}

# Rule 1 of the numerics: relative RMS error against fp64, and the factor of the unfused error.
RELATIVE_RMS = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 1e-5}
UNFUSED_FACTOR = 2.0
# No element may be off by more than this many times what the RMS may be: a single wrong row of
# many would hardly move the RMS.
WORST_FACTOR = 32
NORM_EPS = 1e-6  # the default


@dataclass(frozen=True, eq=False)
class Case:
    """qkv [tokens, 3, heads, head_dim]; cos, sin [tokens, rotary_dim / 2]; cu_seqlens int32.

    Of K and V one head serves each group of query heads: the group's first one in qkv. q_norm and
    k_norm are [head_dim], if there are any. A sinusoidal case adds sin and cos instead of rotating.
    """

    qkv: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    cu_seqlens: np.ndarray
    group: int = 1
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None
    # [tokens] int32: sin and cos of their angles are added, computed inside; or by cos and sin.
    positions: np.ndarray | None = None
    is_sinusoidal: bool = False

    @property
    def packed(self) -> tuple[np.ndarray, ...]:
        return self.qkv, self.cos, self.sin, self.cu_seqlens

    @property
    def separate(self) -> tuple[np.ndarray, ...]:
        parts = self.qkv[:, 0], self.qkv[:, 1, :: self.group], self.qkv[:, 2, :: self.group]
        return *map(np.ascontiguousarray, parts), self.cos, self.sin, self.cu_seqlens

    @property
    def norms(self) -> dict[str, np.ndarray]:
        """Those that there are, by the names of the keywords."""
        both = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        return {name: x for name, x in both.items() if x is not None}

    @property
    def segments(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.cu_seqlens.tolist()))

    @property
    def longest(self) -> int:
        return max((end - start for start, end in self.segments), default=0)

    @property
    def padding(self) -> np.ndarray:
        """Mask [tokens] of the tokens of no segment."""
        token = np.arange(len(self.qkv))
        return (token < self.cu_seqlens[0]) | (token >= self.cu_seqlens[-1])

    def with_rows(self, rows: slice | int, value: float) -> "Case":
        """The same case with one value in q, k and v of some tokens."""
        qkv = self.qkv.copy()
        qkv[rows] = value
        return replace(self, qkv=qkv)


def make_case(
    lengths: Sequence[int],
    *,
    head_dim: int = 80,
    rotary_dim: int | None = None,
    heads: int = 2,
    dtype: str = "bfloat16",
    leading: int = 0,
    trailing: int = 0,
    seed: int = 0,
    group: int = 1,
    norms: str = "",
    embed: str = "rope",
) -> Case:
    """Random inputs for segments of these lengths, with padding before and behind them.

    norms: of which of q and k the heads are normalised, as letters. embed: "rope", "sinusoidal" by
    tables or "positions".
    """
    rng = np.random.default_rng(seed)
    cu_seqlens = leading + np.cumsum([0, *lengths])
    tokens = int(cu_seqlens[-1]) + trailing
    qkv = rng.standard_normal((tokens, 3, heads, head_dim), np.float32)
    # An angle for every token and column of its own: a mix-up of either shows.
    angles = rng.uniform(-8, 8, (tokens, (rotary_dim or head_dim) // 2))
    weights = rng.uniform(0.5, 1.5, (2, head_dim)).astype(DTYPES[dtype])
    positions = None
    if embed == "positions":  # anywhere, also where angles in fp32 would be wrong
        positions = rng.integers(0, 2**20, tokens).astype(np.int32)
        angles = positions[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    return Case(
        qkv.astype(DTYPES[dtype]),
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        cu_seqlens.astype(np.int32),
        group,
        *(weight if name in norms else None for name, weight in zip("qk", weights, strict=True)),
        positions,
        embed != "rope",
    )


def exact(case: Case, scale: float | None = None) -> np.ndarray:
    """The operation in fp64; 0 for tokens of no segment."""
    *_, cos, sin = (x.astype(np.float64) for x in case.separate[:5])
    q, k, v = _prepared(case, np.float64)
    q, k = (_embed(x, cos, sin, case.is_sinusoidal) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = np.zeros(q.shape)
    for start, end in case.segments:
        p = _softmax(q[start:end], k[start:end], scale)
        out[start:end] = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v[start:end])
    return out


def unfused(case: Case, scale: float | None = None) -> np.ndarray:
    """Separate steps that round to the dtype of qkv in between: what rule 1 expects.

    Norms in fp32, back to the dtype, and times their weight in it; rotation in fp32 and back to the
    dtype, logits and softmax sums in fp32, probabilities cast to the dtype, the second product
    summed and divided in fp32.
    """
    dtype = case.qkv.dtype
    q, k, v = _prepared(case, np.float32, _rounding(dtype))
    q, k = (_embed(x, case.cos, case.sin, case.is_sinusoidal) for x in (q, k))
    q, k = (x.astype(dtype).astype(np.float32) for x in (q, k))
    scale = np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    out = np.zeros(q.shape, dtype)
    for start, end in case.segments:
        p = _softmax(q[start:end], k[start:end], scale)
        total = p.sum(-1).T[..., None]
        p = p.astype(dtype).astype(np.float32)
        out[start:end] = np.einsum("hqk,khd->qhd", p, v[start:end]) / total
    return out


def gradients(case: Case, weights: np.ndarray, exact: bool = True) -> tuple[np.ndarray, ...]:
    """The gradients of sum(weights * result) in q, k, v, q_norm and k_norm (without one, None).

    In fp64, or by separate steps in fp32 that round to the dtype of qkv in between.
    """
    dtype = case.qkv.dtype
    wide, rounded = (np.float64, lambda x: x) if exact else (np.float32, _rounding(dtype))
    cos, sin, weights = (x.astype(wide) for x in (case.cos, case.sin, weights))
    q, k, v = _prepared(case, wide, rounded)
    q, k = (rounded(_rotate(x, cos, sin)) for x in (q, k))
    scale = wide(q.shape[-1] ** -0.5)
    q_grad, k_grad, v_grad = (np.zeros(x.shape, wide) for x in (q, k, v))
    for start, end in case.segments:
        rows = slice(start, end)
        p = _softmax(q[rows], k[rows], scale)
        total = p.sum(-1, keepdims=True)
        grad = rounded(weights[rows])
        v_grad[rows] = np.einsum("hqk,qhd->khd", rounded(p), grad / total[..., 0].T[..., None])
        p_grad = np.einsum("qhd,khd->hqk", grad, v[rows])
        p = p / total
        s_grad = p * (p_grad - (p * p_grad).sum(-1, keepdims=True)) * scale
        q_grad[rows] = rounded(np.einsum("hqk,khd->qhd", s_grad, k[rows]))
        k_grad[rows] = rounded(np.einsum("hqk,qhd->khd", s_grad, q[rows]))
    q_grad, k_grad = (_rotate(x, cos, -sin) for x in (q_grad, k_grad))
    k_grad, v_grad = (
        x.reshape(len(x), -1, case.group, x.shape[-1]).sum(2) for x in (k_grad, v_grad)
    )
    q, k, *_ = (x.astype(wide) for x in case.separate)
    q_grad, q_norm_grad = _normalize_back(q, case.q_norm, rounded(q_grad))
    k_grad, k_norm_grad = _normalize_back(k, case.k_norm, rounded(k_grad))
    found = q_grad, k_grad, v_grad, q_norm_grad, k_norm_grad
    return found if exact else tuple(None if x is None else x.astype(dtype) for x in found)


def _prepared(
    case: Case, wide: type, rounded: Callable[[np.ndarray], np.ndarray] = lambda x: x
) -> tuple[np.ndarray, ...]:
    """q and k normalised, k and v of as many heads as q."""
    q, k, v = (x.astype(wide) for x in case.separate[:3])
    q, k = (_normalize(x, weight, rounded) for x, weight in ((q, case.q_norm), (k, case.k_norm)))
    return q, *(x.repeat(case.group, axis=1) for x in (k, v))


def _normalize(
    x: np.ndarray, weight: np.ndarray | None, rounded: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """RMSNorm of each head, as Hugging Face has it."""
    if weight is None:
        return x
    return rounded(rounded(x * _inverse_rms(x)) * weight.astype(x.dtype))


def _normalize_back(
    x: np.ndarray, weight: np.ndarray | None, grad: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """The gradients in x and the weight, from that of what `_normalize` returns."""
    if weight is None:
        return grad, None
    inverse = _inverse_rms(x)
    y, y_grad = x * inverse, grad * weight.astype(x.dtype)
    x_grad = inverse * (y_grad - y * (y * y_grad).mean(-1, keepdims=True))
    return x_grad, (y * grad).sum((0, 1))


def _inverse_rms(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(NORM_EPS))


def _rounding(dtype: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x.astype(dtype).astype(x.dtype)


def log_sum_exps(case: Case) -> np.ndarray:
    """Of each row's logits, as powers of two, [heads, tokens]; 0 for padding. Q and K are rotated
    in fp64 and rounded to their dtype, as the kernels do it in fp32.
    """
    dtype = case.qkv.dtype
    q, k, _, cos, sin = (x.astype(np.float64) for x in case.separate[:5])
    q, k = (_rotate(x, cos, sin).astype(dtype).astype(np.float64) for x in (q, k))
    result = np.zeros(q.shape[1::-1])
    for start, end in case.segments:
        rows = slice(start, end)
        logits = np.einsum("qhd,khd->hqk", q[rows], k[rows]) * q.shape[-1] ** -0.5
        largest = logits.max(-1, keepdims=True, initial=-np.inf)
        result[:, rows] = largest[..., 0] + np.log(np.exp(logits - largest).sum(-1))
    return result / np.log(2)


def _embed(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, is_sinusoidal: bool) -> np.ndarray:
    """Rotated, or with each angle's sine added to an even column and its cosine to the next."""
    if not is_sinusoidal:
        return _rotate(x, cos, sin)
    y = x.copy()
    y[..., 0::2] += sin[:, None]
    y[..., 1::2] += cos[:, None]
    return y


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn each pair (x[i], x[i + rotary_dim / 2]) by its angle: complex multiplication."""
    half = cos.shape[-1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * (cos + 1j * sin)[:, None]
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1).astype(x.dtype)


def _softmax(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Not yet normalised; [heads, q_seq, k_seq]."""
    logits = np.einsum("qhd,khd->hqk", q, k) * scale
    return np.exp(logits - logits.max(-1, keepdims=True, initial=-np.inf))


def relative_rms(result: np.ndarray, reference: np.ndarray) -> float:
    """||result - reference|| / ||reference||, NaN where the result has one."""
    return np.linalg.norm(result.astype(np.float64) - reference) / np.linalg.norm(reference)


def assert_accurate_gradients(found: Sequence[np.ndarray], case: Case, weights: np.ndarray) -> None:
    """Of sum(weights * result) in q, k, v and what norms there are: each as exact as by separate
    steps.
    """
    right, separate = (
        [x for x in gradients(case, weights, exact) if x is not None] for exact in (True, False)
    )
    for ours, theirs, expected in zip(found, separate, right, strict=True):
        assert ours.dtype == case.qkv.dtype
        assert ours.shape == expected.shape
        error, limit = (relative_rms(x, expected) for x in (ours, theirs))
        assert error <= UNFUSED_FACTOR * limit


def assert_accurate(result: np.ndarray, case: Case, scale: float | None = None) -> None:
    """Rule 1 of the numerics, the dtype and shape, and exact zeros for padding."""
    assert result.dtype == case.qkv.dtype
    assert result.shape == (len(case.qkv), *case.qkv.shape[2:])
    assert (result[case.padding] == 0).all()
    expected = exact(case, scale)
    limit = RELATIVE_RMS[result.dtype.name]
    error = relative_rms(result, expected)
    assert error <= limit
    assert error <= UNFUSED_FACTOR * relative_rms(unfused(case, scale), expected)
    worst = np.abs(result.astype(np.float64) - expected).max()
    assert worst <= WORST_FACTOR * limit * np.sqrt(np.mean(expected**2))


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """NaN equals NaN, and 0 differs from -0."""
    assert a.dtype == b.dtype
    integer = np.dtype(f"u{a.dtype.itemsize}")
    np.testing.assert_array_equal(a.view(integer), b.view(integer))
