"""What the public functions accept, said in one place, and said clearly when it is not met."""

import itertools
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

# Of a call's tensors, by how many there are.
NAMES = {
    4: ("qkv", "cos", "sin", "cu_seqlens"),
    6: ("q", "k", "v", "cos", "sin", "cu_seqlens"),
}
FUSE = ("auto", "qk", "q", "none")
IMPLEMENTATIONS = ("auto", "kernel", "triton", "reference")  # "triton" is the kernel, too
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What tells Q and K their tokens' places: rotated by angles, or with sin and cos added to them.
EMBEDDINGS = ("rope", "sinusoidal", "positions")  # the last of angles that are computed inside
MAX_HEAD_DIM = 16384
# Wider heads are read chunk by chunk: they have no norms, and their gradients are the reference's.
MAX_TILED_HEAD_DIM = 256
# Offsets inside a tile and numbers of rows are 32-bit; offsets of a segment are 64-bit.
MAX_TOKEN_STRIDE = 2**23
MAX_TOKENS = 2**30
MAX_SEGMENTS = 2**22
# What CUDA launches at once.
MAX_PROGRAMS = 2**31 - 1
# Of these neither the factor nor its products with logits leave fp32.
SCALES = (2.0**-100, 2.0**100)
NORM_EPS = 1e-6


class Norms(NamedTuple):
    """RMSNorm of each head of Q and of K: their weights [head_dim], None where there is none."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    eps: float

    @property
    def given(self) -> list[torch.Tensor]:
        """The weights that there are."""
        return [x for x in (self.q, self.k) if x is not None]


def check_cu_seqlens(cu_seqlens: torch.Tensor, tokens: int, max_seqlen: int | None = None) -> None:
    """Check the values of cu_seqlens on the host; waits for the GPU, so call it while debugging.

    The kernels never need it to stay within their tensors; it tells which value is wrong.

    Args:
        cu_seqlens: [segments + 1] int32.
        tokens: rows of q.
        max_seqlen: the bound that goes with it, if there is one.

    Raises:
        TypeError, ValueError: no tensor, not int32 or not one-dimensional; or the first value that
            is negative, beyond tokens, below its predecessor, or ends a segment longer than
            max_seqlen, with its place.
    """
    _check_tensor("cu_seqlens", cu_seqlens)
    _check_cu_seqlens_form(cu_seqlens)
    for i, (start, value) in enumerate(itertools.pairwise([0, *cu_seqlens.tolist()])):
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
    tensors: Sequence[torch.Tensor],
    max_seqlen: int | None,
    scale: float | None,
    fuse: str,
    implementation: str,
    batch_invariant: bool,
    embed: str = "rope",
    norms: Norms | None = None,
    *,
    may_be_rounded: bool = False,
) -> None:
    """Raise TypeError or ValueError for the first argument that breaks the documented contract.

    tensors are (q, k, v, cos, sin, cu_seqlens), or (qkv, cos, ...); by positions these stand in
    place of cos and of sin. A tensor with a forward-mode derivative raises NotImplementedError.
    may_be_rounded: cos and sin may have the dtype of q, too.
    """
    # int comes first: asking the abstract class takes longer.
    ints = (int, torch.SymInt, Integral)
    is_bound = isinstance(max_seqlen, ints) and _holds(max_seqlen >= 0)
    if max_seqlen is not None and not is_bound:
        raise ValueError(f"max_seqlen must be an int of at least 0 or None, got {max_seqlen!r}")
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise ValueError(f"scale must be a number, as it gets no gradient, got {scale!r}")
    if scale is not None and not _is_scale(scale):
        raise ValueError(f"scale must be from 2**-100 to 2**100 or None, got {scale!r}")
    if fuse not in FUSE:
        raise ValueError(f"fuse must be one of {FUSE}, got {fuse!r}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    if not isinstance(batch_invariant, bool):
        raise ValueError(f"batch_invariant must be True or False, got {batch_invariant!r}")
    _check_tensors(embed, may_be_rounded, *tensors)
    weights = () if norms is None else norms[:2]
    if norms is not None:
        _check_norms(norms, tensors[0])
    # PyTorch drops the tangents of an operator that has no forward mode, in silence.
    if forward_ad._current_level >= 0 and any(map(_has_tangent, (*tensors, *weights, scale))):
        raise NotImplementedError(
            "forward-mode differentiation is not supported, use reverse mode (backward, grad)"
        )


def check_tables_or_positions(cos: Any, sin: Any, positions: Any) -> None:
    """Raise ValueError unless there are either both tables or positions alone."""
    tables = [name for name, x in (("cos", cos), ("sin", sin)) if x is not None]
    if (len(tables) == 2) == (positions is not None) or len(tables) == 1:
        given = " and ".join([*tables, *(["positions"] if positions is not None else [])])
        raise ValueError(f"give either cos and sin or positions alone, got {given or 'neither'}")


def check_position_values(positions: torch.Tensor) -> None:
    """Raise ValueError for negative positions on a CPU. To look at a GPU's would wait for it."""
    is_looked_at = positions.device.type == "cpu" and positions.numel() > 0
    if is_looked_at and (least := int(positions.min())) < 0:
        raise ValueError(f"positions must be at least 0, got {least}")


def _check_tensors(embed: str, may_be_rounded: bool, *tensors: torch.Tensor) -> None:
    names = NAMES[len(tensors)]
    if embed == "positions":
        names = tuple("positions" if name in ("cos", "sin") else name for name in names)
    for name, x in zip(names, tensors, strict=True):
        _check_tensor(name, x)
    *qkv, cos, sin, cu_seqlens = tensors
    first, packed = qkv[0], len(qkv) == 1
    form = "[tokens, 3, heads, head_dim]" if packed else "[tokens, heads, head_dim]"
    for name, x in zip(names, qkv, strict=False):
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
        if x.ndim != (4 if packed else 3) or (packed and x.shape[1] != 3):
            raise ValueError(f"{name} must have shape {form}, got {tuple(x.shape)}")
        if name == "k" and (x.dtype != first.dtype or not _serves(x.shape, first.shape)):
            raise ValueError(
                f"k must have the dtype and shape of q, {_form(first)}, but for fewer heads that "
                f"divide its own, got {_form(x)}"
            )
        if name == "v" and (x.shape != qkv[1].shape or x.dtype != first.dtype):
            raise ValueError(
                f"v must have the dtype and shape of k, {_form(qkv[1])}, got {_form(x)}"
            )
        if x.device != first.device:
            raise ValueError(f"{name} must be on {first.device} like {names[0]}, got {x.device}")
        _check_strides(name, x)
    tokens, *_, heads, head_dim = first.shape
    if not _holds(tokens <= MAX_TOKENS):
        raise ValueError(f"at most {MAX_TOKENS} tokens are supported, got {tokens}")
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}")
    if heads * head_dim > MAX_TOKEN_STRIDE:  # the result's token stride
        raise ValueError(
            f"heads x head_dim must be at most {MAX_TOKEN_STRIDE}, got {heads} x {head_dim}"
        )
    if embed == "positions":
        _check_positions(first, cos)
    else:
        _check_angles(first, cos, sin, embed, may_be_rounded)
    _check_cu_seqlens_form(cu_seqlens)
    programs = (cu_seqlens.shape[0] - 1) * heads
    if not _holds(programs <= MAX_PROGRAMS):
        raise ValueError(f"segments x heads must be at most {MAX_PROGRAMS}, got {programs}")
    if cu_seqlens.device != first.device:
        raise ValueError(f"cu_seqlens must be on {first.device}, got {cu_seqlens.device}")


def _serves(k: torch.Size, q: torch.Size) -> bool:
    """Whether K of a shape serves Q: each of its heads as many."""
    *others, heads, head_dim = k
    return [*others, head_dim] == [*q[:-2], q[-1]] and (
        heads == q[-2] or (heads > 0 and q[-2] % heads == 0)
    )


def _form(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _check_norms(norms: Norms, first: torch.Tensor) -> None:
    try:
        is_eps = bool(0 <= norms.eps <= 1)
    except (TypeError, ValueError, RuntimeError):
        is_eps = False
    if not is_eps:
        raise ValueError(f"norm_eps must be from 0 to 1, got {norms.eps!r}")
    head_dim = first.shape[-1]
    if head_dim > MAX_TILED_HEAD_DIM:
        raise ValueError(
            f"q_norm and k_norm are for heads of up to {MAX_TILED_HEAD_DIM} columns, got {head_dim}"
        )
    for name, x in (("q_norm", norms.q), ("k_norm", norms.k)):
        if x is None:
            continue
        _check_tensor(name, x)
        if x.dtype != first.dtype or x.shape != (head_dim,):
            raise ValueError(
                f"{name} must be [{head_dim}] {first.dtype}, as the heads are, or None, "
                f"got {tuple(x.shape)} {x.dtype}"
            )
        if x.device != first.device or not x.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous and on {first.device}, got strides {x.stride()} and "
                f"{x.device}"
            )


def _has_tangent(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def _holds(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds; where a trace does not know, that is for it to check."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    # Importing it takes half a second, which a trace has spent.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if not guard_or_true(condition):
        return False
    torch._check(condition)
    return True


def is_exporting() -> bool:
    """`torch.compiler.is_exporting`, but for all that Dynamo traces before PyTorch 2.13.

    There that says yes, whatever it is traced for.
    """
    return torch.compiler._is_exporting_flag


def surely(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes is known to hold: False where a trace does not know."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _check_strides(name: str, x: torch.Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() > 0:
        raise ValueError(f"{name} must be contiguous in its last axis, got strides {x.stride()}")
    if x.stride(0) > MAX_TOKEN_STRIDE:
        raise ValueError(
            f"{name} must have a token stride of at most {MAX_TOKEN_STRIDE} elements, "
            f"got {x.stride(0)}"
        )


def _is_scale(scale: Any) -> bool:
    """Whether it lies within SCALES; False where that cannot be told, as of a string."""
    try:
        # Not by its own type, in which the limits may be 0 or infinity.
        return bool(scale > 0) and SCALES[0] <= float(scale) <= SCALES[1]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several values, or 10**400
        return False


def _check_positions(first: torch.Tensor, positions: torch.Tensor) -> None:
    if positions.dtype != torch.int32:
        raise TypeError(f"positions must be int32, got {positions.dtype}")
    if positions.ndim != 1 or positions.shape[0] != first.shape[0]:
        raise ValueError(
            f"positions must have shape [{first.shape[0]} tokens], got {tuple(positions.shape)}"
        )
    if positions.device != first.device:
        raise ValueError(f"positions must be on {first.device}, got {positions.device}")


def _check_angles(
    first: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, embed: str, may_be_rounded: bool
) -> None:
    tokens, head_dim = first.shape[0], first.shape[-1]
    for name, x in (("cos", cos), ("sin", sin)):
        rounded = may_be_rounded and cos.dtype == sin.dtype == first.dtype
        if x.dtype != torch.float32 and not rounded:
            raise TypeError(f"{name} must be float32 (angles need it), got {x.dtype}")
        if embed == "sinusoidal" and x.shape != (tokens, head_dim // 2):
            raise ValueError(
                f"{name} must have shape [{tokens} tokens, {head_dim // 2}], half of head_dim, got "
                f"{tuple(x.shape)}"
            )
        if x.ndim != 2 or x.shape[0] != tokens or not 1 <= x.shape[1] <= head_dim // 2:
            raise ValueError(
                f"{name} must have shape [{tokens} tokens, rotary_dim / 2] with rotary_dim at most "
                f"{head_dim}, got {tuple(x.shape)}"
            )
        if x.device != first.device:
            raise ValueError(f"{name} must be on {first.device}, got {x.device}")
        if x.shape != cos.shape or x.stride() != cos.stride():
            raise ValueError(
                f"sin must have the shape and strides of cos, {tuple(cos.shape)} {cos.stride()}, "
                f"got {tuple(x.shape)} {x.stride()}"
            )
        _check_strides(name, x)


def _check_cu_seqlens_form(x: torch.Tensor) -> None:
    if x.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32, got {x.dtype}")
    if x.ndim != 1 or not x.is_contiguous() or not _holds(x.shape[0] >= 1):
        raise ValueError(
            "cu_seqlens must be a contiguous vector of segments + 1 values, "
            f"got shape {tuple(x.shape)} and strides {x.stride()}"
        )
    if not _holds((segments := x.shape[0] - 1) <= MAX_SEGMENTS):
        raise ValueError(f"at most {MAX_SEGMENTS} segments are supported, got {segments}")
