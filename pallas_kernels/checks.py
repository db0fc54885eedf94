"""What the public functions accept, said in one place, and said clearly when it is not met."""

import itertools
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Of a call's arrays, by how many there are.
NAMES = {
    4: ("qkv", "cos", "sin", "cu_seqlens"),
    6: ("q", "k", "v", "cos", "sin", "cu_seqlens"),
}
FUSE = ("auto", "qk", "q", "none")
# "triton" is another word for "kernel".
IMPLEMENTATIONS = ("auto", "kernel", "triton", "reference")
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# What tells Q and K their tokens' places: rotated by angles, or with sin and cos added to them.
EMBEDDINGS = ("rope", "sinusoidal", "positions")  # the last of angles that are computed inside
MAX_HEAD_DIM = 16384
# Wider heads are read chunk by chunk: they have no norms, and their gradients are the reference's.
MAX_TILED_HEAD_DIM = 256
# Numbers of rows are 32-bit.
MAX_TOKENS = 2**30
MAX_SEGMENTS = 2**22
# What CUDA launches at once.
MAX_PROGRAMS = 2**31 - 1
# Of these neither the factor nor its products with logits leave fp32.
SCALES = (2.0**-100, 2.0**100)
NORM_EPS = 1e-6

# Weights [head_dim] of an RMSNorm of each head of Q and of K, None where there is none.
Norms = tuple[jax.Array | None, jax.Array | None]
NO_NORMS: Norms = (None, None)


def check_cu_seqlens(cu_seqlens: jax.Array, tokens: int, max_seqlen: int | None = None) -> None:
    """Check the values of cu_seqlens on the host; waits for the GPU, so call it while debugging.

    The kernels never need it to stay within their arrays; it tells which value is wrong.

    Args:
        cu_seqlens: [segments + 1] int32, not traced.
        tokens: rows of q.
        max_seqlen: the bound that goes with it, if there is one.

    Raises:
        TypeError, ValueError: no array, not int32 or not one-dimensional; or the first value that
            is negative, beyond tokens, below its predecessor, or ends a segment longer than
            max_seqlen, with its place.
    """
    _check_array("cu_seqlens", cu_seqlens)
    _check_cu_seqlens_form(cu_seqlens)
    for i, (start, value) in enumerate(itertools.pairwise([0, *np.asarray(cu_seqlens).tolist()])):
        if not 0 <= value <= tokens:
            raise ValueError(f"cu_seqlens[{i}] must be in 0..{tokens} (tokens), got {value}")
        if value < start:
            both = f"cu_seqlens[{i - 1}] = {start} and cu_seqlens[{i}] = {value}"
            raise ValueError(f"cu_seqlens must not decrease, got {both}")
        if i and max_seqlen is not None and value - start > max_seqlen:
            raise ValueError(
                f"segment {i - 1} ({start} to {value}) is {value - start} tokens long, above "
                f"max_seqlen = {max_seqlen}"
            )


def check_arguments(
    arrays: Sequence[jax.Array],
    max_seqlen: int | None,
    scale: float | None,
    fuse: str,
    implementation: str,
    batch_invariant: bool,
    norms: Norms = NO_NORMS,
    norm_eps: float = NORM_EPS,
    embed: str = "rope",
) -> None:
    """Raise TypeError or ValueError for the first argument that breaks the documented contract.

    arrays are (q, k, v, cos, sin, cu_seqlens), or (qkv, cos, ...); by positions these stand in
    place of cos and of sin.
    """
    for name, x in (("max_seqlen", max_seqlen), ("scale", scale), ("norm_eps", norm_eps)):
        if isinstance(x, jax.core.Tracer):
            raise ValueError(f"{name} must be static, got a traced value")
    if max_seqlen is not None and (not isinstance(max_seqlen, Integral) or max_seqlen < 0):
        raise ValueError(f"max_seqlen must be an int of at least 0 or None, got {max_seqlen!r}")
    if scale is not None and not _is_scale(scale):
        raise ValueError(f"scale must be from 2**-100 to 2**100 or None, got {scale!r}")
    if fuse not in FUSE:
        raise ValueError(f"fuse must be one of {FUSE}, got {fuse!r}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    if not isinstance(batch_invariant, bool):
        raise ValueError(f"batch_invariant must be True or False, got {batch_invariant!r}")
    _check_arrays(embed, *arrays)
    if any(x is not None for x in norms):
        _check_norms(norms, norm_eps, arrays[0])


def check_tables_or_positions(cos: Any, sin: Any, positions: Any) -> None:
    """Raise ValueError unless there are either both tables or positions alone."""
    tables = [name for name, x in (("cos", cos), ("sin", sin)) if x is not None]
    if (len(tables) == 2) == (positions is not None) or len(tables) == 1:
        given = " and ".join([*tables, *(["positions"] if positions is not None else [])])
        raise ValueError(f"give either cos and sin or positions alone, got {given or 'neither'}")


def check_position_values(positions: Any) -> None:
    """Raise ValueError for negative positions that are on the host, neither traced nor a GPU's."""
    on_host = isinstance(positions, np.ndarray) or (
        isinstance(positions, jax.Array)
        and not isinstance(positions, jax.core.Tracer)
        and all(device.platform == "cpu" for device in positions.devices())
    )
    if on_host and positions.size and (least := int(np.asarray(positions).min())) < 0:
        raise ValueError(f"positions must be at least 0, got {least}")


def _check_arrays(embed: str, *arrays: jax.Array) -> None:
    names = NAMES[len(arrays)]
    if embed == "positions":
        names = tuple("positions" if name in ("cos", "sin") else name for name in names)
    for name, x in zip(names, arrays, strict=True):
        _check_array(name, x)
    *qkv, cos, sin, cu_seqlens = arrays
    first, packed = qkv[0], len(qkv) == 1
    form = "[tokens, 3, heads, head_dim]" if packed else "[tokens, heads, head_dim]"
    for name, x in zip(names, qkv, strict=False):
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
        if x.ndim != (4 if packed else 3) or (packed and x.shape[1] != 3):
            raise ValueError(f"{name} must have shape {form}, got {x.shape}")
        if name == "k" and (x.dtype != first.dtype or not _serves(x.shape, first.shape)):
            raise ValueError(
                f"k must have the dtype and shape of q, {_form(first)}, but for fewer heads that "
                f"divide its own, got {_form(x)}"
            )
        if name == "v" and (x.shape != qkv[1].shape or x.dtype != first.dtype):
            raise ValueError(
                f"v must have the dtype and shape of k, {_form(qkv[1])}, got {_form(x)}"
            )
    tokens, *_, heads, head_dim = first.shape
    if tokens > MAX_TOKENS:
        raise ValueError(f"at most {MAX_TOKENS} tokens are supported, got {tokens}")
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}")
    if embed == "positions":
        _check_positions(first, cos)
    else:
        _check_angles(first, cos, sin, embed)
    _check_cu_seqlens_form(cu_seqlens)
    if (programs := (cu_seqlens.shape[0] - 1) * heads) > MAX_PROGRAMS:
        raise ValueError(f"segments x heads must be at most {MAX_PROGRAMS}, got {programs}")


def _serves(k: tuple[int, ...], q: tuple[int, ...]) -> bool:
    """Whether K of a shape serves Q: each of its heads as many."""
    *others, heads, head_dim = k
    return [*others, head_dim] == [*q[:-2], q[-1]] and (
        heads == q[-2] or (heads > 0 and q[-2] % heads == 0)
    )


def _form(x: jax.Array) -> str:
    return f"{x.dtype} {x.shape}"


def _check_norms(norms: Norms, eps: float, first: jax.Array) -> None:
    try:
        is_eps = bool(0 <= eps <= 1)
    except (TypeError, ValueError):
        is_eps = False
    if not is_eps:
        raise ValueError(f"norm_eps must be from 0 to 1, got {eps!r}")
    head_dim = first.shape[-1]
    if head_dim > MAX_TILED_HEAD_DIM:
        raise ValueError(
            f"q_norm and k_norm are for heads of up to {MAX_TILED_HEAD_DIM} columns, got {head_dim}"
        )
    for name, x in zip(("q_norm", "k_norm"), norms, strict=True):
        if x is None:
            continue
        _check_array(name, x)
        if x.dtype != first.dtype or x.shape != (head_dim,):
            raise ValueError(
                f"{name} must be [{head_dim}] {first.dtype}, as the heads are, or None, "
                f"got {x.shape} {x.dtype}"
            )


def _check_array(name: str, x: Any) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be a jax.Array, got {type(x).__name__}")
    if not all(isinstance(size, int) for size in x.shape):  # jax.export's symbolic dimensions
        raise ValueError(f"{name} must have sizes that are known, got {x.shape}: export each size")


def _is_scale(scale: Any) -> bool:
    """Whether it lies within SCALES; False where that cannot be told, as of a string."""
    try:
        # Not by its own type, in which the limits may be 0 or infinity.
        return bool(scale > 0) and SCALES[0] <= float(scale) <= SCALES[1]
    except (TypeError, ValueError, OverflowError):  # several values, or 10**400
        return False


def _check_positions(first: jax.Array, positions: jax.Array) -> None:
    if positions.dtype != jnp.int32:
        raise TypeError(f"positions must be int32, got {positions.dtype}")
    if positions.shape != first.shape[:1]:
        raise ValueError(
            f"positions must have shape [{first.shape[0]} tokens], got {positions.shape}"
        )


def _check_angles(first: jax.Array, cos: jax.Array, sin: jax.Array, embed: str) -> None:
    tokens, head_dim = first.shape[0], first.shape[-1]
    for name, x in (("cos", cos), ("sin", sin)):
        if x.dtype != jnp.float32:
            raise TypeError(f"{name} must be float32 (angles need it), got {x.dtype}")
        if embed == "sinusoidal" and x.shape != (tokens, head_dim // 2):
            raise ValueError(
                f"{name} must have shape [{tokens} tokens, {head_dim // 2}], half of head_dim, got "
                f"{x.shape}"
            )
        if x.ndim != 2 or x.shape[0] != tokens or not 1 <= x.shape[1] <= head_dim // 2:
            raise ValueError(
                f"{name} must have shape [{tokens} tokens, rotary_dim / 2] with rotary_dim at most "
                f"{head_dim}, got {x.shape}"
            )
    if sin.shape != cos.shape:
        raise ValueError(f"sin must have the shape of cos, {cos.shape}, got {sin.shape}")


def _check_cu_seqlens_form(x: jax.Array) -> None:
    if x.dtype != jnp.int32:
        raise TypeError(f"cu_seqlens must be int32, got {x.dtype}")
    if x.ndim != 1 or x.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be a vector of segments + 1 values, got shape {x.shape}")
    if (segments := x.shape[0] - 1) > MAX_SEGMENTS:
        raise ValueError(f"at most {MAX_SEGMENTS} segments are supported, got {segments}")
