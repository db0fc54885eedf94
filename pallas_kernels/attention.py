"""The public functions: check arguments, settle what is static, run; and what JAX derives."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checks import (
    NO_NORMS,
    NORM_EPS,
    Norms,
    check_arguments,
    check_position_values,
    check_tables_or_positions,
)
from pallas_kernels.kernels.dialect import HAVE_TRITON, without_triton
from pallas_kernels.launching.backward import (
    attention_gradients,
    has_gradient_kernels,
    needs_lse,
)
from pallas_kernels.launching.choose import auto_fuse, has_kernel
from pallas_kernels.launching.devices import have_tensor_cores, warn_without_triton
from pallas_kernels.launching.plan import attend, operands
from pallas_kernels.launching.platforms import platform_dependent
from pallas_kernels.launching.table import next_power_of_2
from pallas_kernels.reference import (
    normalize_reference,
    rope_attention_gradients,
    rope_attention_reference,
    spread_heads,
)
from pallas_kernels.sharding import check_shardings, on_own_heads, vary_as


def fused_rope_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cu_seqlens: jax.Array,
    *,
    max_seqlen: int | None = None,
    scale: float | None = None,
    fuse: str = "auto",
    implementation: str = "auto",
    batch_invariant: bool = False,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    norm_eps: float = NORM_EPS,
) -> jax.Array:
    """Attention within segments, with the rotary embedding of Q and K inside the kernel.

    Args:
        q, k, v: [tokens, heads, head_dim], bf16, fp16 or fp32; head_dim a multiple of 8 up to
            16,384. k and v may have fewer heads, which divide q's: each serves as many neighbours
            among these (grouped queries).
        cos, sin: [tokens, rotary_dim / 2] fp32, the angles of each token, applied in the split-half
            (NeoX) form. Dims of a head behind rotary_dim pass unrotated.
        cu_seqlens: [segments + 1] int32, cumulative segment starts. Segments may be empty; tokens
            before the first and behind the last are padding. Where values decrease, which
            `check_cu_seqlens` finds, rows between them may be anything.
        max_seqlen: static upper bound on a segment's length, for which a call is compiled. None:
            the longest of cu_seqlens, which must then not be traced, rounded up to a power of two.
            Rows of a segment that is longer, and their gradients, come out right or NaN, never
            wrong.
        scale: static factor of the logits, 2 ** -100 to 2 ** 100; default head_dim ** -0.5.
        fuse: "qk" rotates Q and K inside the kernel, "q" rotates K in a pass of its own, "none"
            both. "auto": "qk" where one tile holds a segment, so that no row is rotated twice;
            else "none", or "q" where rotary_dim < head_dim and head_dim is a multiple of 16, but
            for long images on Hopper GPUs, see `is_warp_specialized`.
        implementation: "kernel" is the kernel on Pallas' Triton backend, but over long images on
            Hopper GPUs on its Mosaic GPU backend, see `is_warp_specialized` (on a CPU: in Pallas'
            interpreter, which needs jax_enable_x64 off, check_vma=False under shard_map, and heads
            that are split over all axes of an explicit mesh that is set), "reference" plain jnp;
            "auto" the kernel where the computation runs on a CUDA GPU of compute capability 8.0 or
            newer, else the reference. "triton" is another word for "kernel".
        batch_invariant: have the kernels give a segment the same bits alone, in any batch and at
            any place in it, on one GPU. Else which kernel serves it, and by which tiles, follows
            from all that is in a call, as it always does for gradients. Long segments cost a second
            launch and the warp-specialized kernel; `python -m compare invariance` measures it.
        q_norm, k_norm: [head_dim] in the dtype of q: weights of an RMSNorm of each head of q, or of
            k, where it is rotated and before that, in fp32. In longer segments than one tile holds,
            k with a norm is rotated in a pass of its own, whatever fuse says. Heads of more than
            256 columns have none.
        norm_eps: static, what is added to the mean square of a head, 0 to 1.

    Returns:
        [tokens, heads, head_dim] in the dtype of q; exactly 0 for padding.

    Raises:
        TypeError, ValueError: a type, dtype, shape or keyword is not as stated above, or an array's
            type says that it is split over devices otherwise than by heads.
        NotImplementedError: `implementation="kernel"` where JAX has no Pallas Triton backend.

    Differentiable in q, k, v, cos, sin and norms in reverse mode. Kernels compute the gradients in
    q, k, v and norms: where no tile holds a segment, see `window_limit`, of the result and a number
    for each of its rows, which are kept, or with norms computed again. The reference does those in
    cos and sin, those of heads of more than 256 columns, and further derivatives. Under vmap the
    calls run one after the other. With q, k and v split by heads along explicit axes of a mesh, or
    under shard_map, there also with all arguments split by calls, each device runs its own.
    """
    options = max_seqlen, scale, fuse, implementation, batch_invariant, (q_norm, k_norm), norm_eps
    return _call((q, k, v, cos, sin, cu_seqlens), *options)


def fused_rope_attention_qkvpacked(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cu_seqlens: jax.Array,
    *,
    max_seqlen: int | None = None,
    scale: float | None = None,
    fuse: str = "auto",
    implementation: str = "auto",
    batch_invariant: bool = False,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    norm_eps: float = NORM_EPS,
) -> jax.Array:
    """fused_rope_attention on qkv [tokens, 3, heads, head_dim], read in place.

    That is what a QKV projection writes; it is neither split nor copied. Everything else is as in
    fused_rope_attention.
    """
    options = max_seqlen, scale, fuse, implementation, batch_invariant, (q_norm, k_norm), norm_eps
    return _call((qkv, cos, sin, cu_seqlens), *options)


def fused_sinusoidal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    cu_seqlens: jax.Array,
    *,
    positions: jax.Array | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
    fuse: str = "auto",
    implementation: str = "auto",
    batch_invariant: bool = False,
) -> jax.Array:
    """Attention within segments, with sinusoidal embeddings added to Q and K inside the kernel.

    sin is added to the even columns of each head of Q and K and cos to the odd ones, in fp32, and
    the sum is rounded to the dtype of q (Vaswani et al., Attention Is All You Need, 2017, whose
    PE(pos, 2i) = sin(pos / 10000^(2i / head_dim)), PE(pos, 2i + 1) = cos of the same, here of
    attention's own inputs).

    Args:
        q, k, v, cu_seqlens, max_seqlen, scale, implementation, batch_invariant: as in
            fused_rope_attention. There are no norms.
        cos, sin: [tokens, head_dim / 2] fp32, see `sinusoidal_tables`; None where there are
            positions.
        positions: [tokens] int32, at least 0, in place of cos and sin, which are computed inside,
            exact to 5e-7 at any position. Negative ones are an error on a CPU outside of a trace;
            else their segments come out NaN.
        fuse: "qk" adds to Q and K inside the kernel, "q" to K in a pass of its own, "none" to both.
            "auto": "qk" where one tile holds a segment, else "none".

    Returns:
        [tokens, heads, head_dim] in the dtype of q; exactly 0 for padding.

    Raises:
        TypeError, ValueError, NotImplementedError: as fused_rope_attention; or there are both
            tables and positions, or neither.

    Differentiable in q, k, v, cos and sin in reverse mode, by the reference. Under vmap, and with
    heads that are split over devices, as fused_rope_attention.
    """
    options = max_seqlen, scale, fuse, implementation, batch_invariant
    return _call_sinusoidal((q, k, v), cos, sin, positions, cu_seqlens, *options)


def fused_sinusoidal_attention_qkvpacked(
    qkv: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    cu_seqlens: jax.Array,
    *,
    positions: jax.Array | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
    fuse: str = "auto",
    implementation: str = "auto",
    batch_invariant: bool = False,
) -> jax.Array:
    """fused_sinusoidal_attention on qkv [tokens, 3, heads, head_dim], read in place.

    Everything else is as in fused_sinusoidal_attention.
    """
    options = max_seqlen, scale, fuse, implementation, batch_invariant
    return _call_sinusoidal((qkv,), cos, sin, positions, cu_seqlens, *options)


def _call_sinusoidal(
    qkv: tuple[jax.Array, ...],
    cos: jax.Array | None,
    sin: jax.Array | None,
    positions: jax.Array | None,
    cu_seqlens: jax.Array,
    *options: int | float | str | bool | None,
) -> jax.Array:
    """What both functions do."""
    check_tables_or_positions(cos, sin, positions)
    if positions is None:
        return _call((*qkv, cos, sin, cu_seqlens), *options, NO_NORMS, NORM_EPS, "sinusoidal")
    check_position_values(positions)
    arrays = *qkv, positions, positions, cu_seqlens
    return _call(arrays, *options, NO_NORMS, NORM_EPS, "positions")


@dataclass(frozen=True)
class _Options:
    """All that is static about a call."""

    max_seqlen: int
    scale: float
    fuse: str
    implementation: str
    batch_invariant: bool
    norm_eps: float
    embed: str


def _call(
    arrays: tuple[jax.Array, ...],
    max_seqlen: int | None,
    scale: float | None,
    fuse: str,
    implementation: str,
    batch_invariant: bool,
    norms: Norms,
    norm_eps: float,
    embed: str = "rope",
) -> jax.Array:
    """Check a call's arguments, settle all that is static about it, and run it."""
    # Before numbers of 64 bits, NumPy's default, become JAX's of 32.
    settings = max_seqlen, scale, fuse, implementation, batch_invariant
    check_arguments(arrays, *settings, norms, norm_eps, embed)
    if max_seqlen is None:
        if isinstance(cu_seqlens := arrays[-1], jax.core.Tracer):
            raise ValueError("max_seqlen must be given where cu_seqlens is traced (by jit or vmap)")
        # A NumPy array's values are known under jit, until it becomes JAX's. Each bound is compiled
        # for, so there are to be few.
        longest = int(np.diff(np.asarray(cu_seqlens, np.int64)).max(initial=0))
        max_seqlen = min(next_power_of_2(longest), arrays[0].shape[0])
    *qkv, cos, sin, cu_seqlens = map(jnp.asarray, arrays)
    norms = jax.tree.map(jnp.asarray, norms)
    check_shardings(*qkv, cos, sin, cu_seqlens, norms=norms)
    max_seqlen, (tokens, *_, heads, head_dim) = int(max_seqlen), qkv[0].shape
    if fuse == "auto" and not batch_invariant:
        rotary_dim = 2 * cos.shape[1] if embed == "rope" else head_dim
        fuse = auto_fuse(qkv[0].dtype, head_dim, rotary_dim, max_seqlen, tokens, heads)
    if implementation == "triton":
        implementation = "kernel"  # the same, so both share one compilation
    if implementation == "kernel" and not HAVE_TRITON:
        raise NotImplementedError(f"implementation='kernel' needs its backend: {without_triton()}")
    if implementation == "auto" and have_tensor_cores():
        shape = qkv[0].dtype, head_dim, max_seqlen, tokens, heads
        if not has_kernel(*shape, qkv[-1].shape[-2], fuse, batch_invariant):
            warn_without_triton()
            implementation = "reference"
    elif implementation == "auto":
        implementation = "reference"
    scale = head_dim**-0.5 if scale is None else float(scale)
    # Without norms that are compiled for one.
    norm_eps = float(norm_eps) if jax.tree.leaves(norms) else NORM_EPS
    options = _Options(max_seqlen, scale, fuse, implementation, batch_invariant, norm_eps, embed)
    result = _run(options, tuple(qkv), norms, cos, sin, cu_seqlens)
    # Within a custom_vmap `jax.debug_nans` looks at nothing; of what is jitted it looks at results.
    return jnp.copy(result) if jax.config.jax_disable_jit else result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    options: _Options,
    keeps_lse: bool,
    qkv: tuple[jax.Array, ...],
    norms: Norms,
    *rest: jax.Array,
) -> tuple[jax.Array, ...]:
    """The result and, if it is kept, the log-sum-exp of each row, see `attend`.

    Qkv is as `operands` takes it, rest is cos, sin and cu_seqlens.
    """
    if qkv[0].size == 0 or rest[-1].shape[0] == 1:
        # Varying over a mesh as v does.
        return (vary_as(qkv[-1])(jnp.zeros_like(qkv[0][:, 0])),)
    bounds = {"max_seqlen": options.max_seqlen, "scale": options.scale}
    bounds |= {"norm_eps": options.norm_eps, "embed": options.embed}
    means = bounds | {"fuse": options.fuse, "batch_invariant": options.batch_invariant}
    kernel = functools.partial(attend, **means, keeps_lse=keeps_lse, interpret=False)
    interpreted = functools.partial(kernel, interpret=True)

    def reference(
        qkv: tuple[jax.Array, ...], norms: Norms, *rest: jax.Array
    ) -> tuple[jax.Array, ...]:
        q_norm, k_norm = norms
        further = bounds | {"q_norm": q_norm, "k_norm": k_norm}
        out = rope_attention_reference(*_q_k_v(qkv), *rest, **further)
        # Of no use, but as much as the kernel's.
        return (out, jnp.zeros_like(out[..., 0].T, jnp.float32)) if keeps_lse else (out,)

    @jax.custom_batching.sequential_vmap
    def call(*arguments: tuple | jax.Array) -> tuple[jax.Array, ...]:
        if options.implementation == "reference":
            return reference(*arguments)
        if options.implementation == "auto":
            return platform_dependent(*arguments, cuda=kernel, default=reference)
        return platform_dependent(*arguments, cuda=kernel, cpu=interpreted)

    return call(qkv, norms, *rest)


def _by_kernels(options: _Options, qkv: tuple[jax.Array, ...], *rest: jax.Array) -> bool:
    """Whether kernels compute the gradients in qkv."""
    is_empty = qkv[0].size == 0 or rest[-1].shape[0] == 1
    if not has_gradient_kernels(qkv[0].shape[-1], options.embed):
        return False
    return HAVE_TRITON and options.implementation != "reference" and not is_empty


def _needs_lse(options: _Options, qkv: tuple[jax.Array, ...]) -> bool:
    return needs_lse(qkv[0].dtype, qkv[0].shape[-1], options.max_seqlen)


def _forward(
    options: _Options, keeps_lse: bool, *arguments: tuple | jax.Array
) -> tuple[tuple[jax.Array, ...], tuple]:
    """The result, and what the backward pass needs of it and of the arguments."""
    qkv, norms, *_ = arguments
    # Normalised heads are rounded behind the rotation here, and in front of it for the gradients.
    needs = _needs_lse(options, qkv) and not jax.tree.leaves(norms)
    needs = needs and _by_kernels(options, *arguments)
    results = _attention(options, needs, *arguments)
    return results if keeps_lse else results[:1], (arguments, results if needs else ())


def _backward(options: _Options, _: bool, residuals: tuple, grads: tuple[jax.Array, ...]) -> tuple:
    """The gradients, from what was kept.

    Where kernels compute those in qkv, what computes the angles' beside it is left out of the
    program unless they are asked for.
    """
    (arguments, kept), grad = residuals, grads[0]
    qkv, norms, *rest = arguments
    qkv_grad, norm_grads, *angle_grads = _reference_gradients(options, grad, *arguments)
    if _by_kernels(options, *arguments):
        # Those in normalised heads, of K and V as many as of Q; JAX's from there.
        prepared, pull = jax.vjp(functools.partial(_prepare, options.norm_eps), qkv, norms)
        if not kept and _needs_lse(options, qkv):
            kept = _attention(options, True, prepared, NO_NORMS, *rest)
        qkv_grad, norm_grads = pull(_qkv_gradients(options, grad, prepared, *rest, *kept))
    return qkv_grad, norm_grads, *angle_grads, None


def _prepare(norm_eps: float, qkv: tuple[jax.Array, ...], norms: Norms) -> tuple[jax.Array, ...]:
    """Qkv with normalised heads, and of K and V as many as of Q, as `operands` takes it."""
    (q, k, v), parts = operands(qkv)
    if not jax.tree.leaves(norms) and k.shape == q.shape:
        return qkv
    q, k, v = (x[:, part] for x, part in zip((q, k, v), parts, strict=True))
    q, k = (
        x if weight is None else normalize_reference(x, weight, norm_eps).astype(v.dtype)
        for x, weight in zip((q, k), norms, strict=True)
    )
    return tuple(spread_heads(x, q.shape[1])[:, None] for x in (q, k, v))


_attention.defvjp(_forward, _backward)


def _reference_gradients(
    options: _Options, grad: jax.Array, qkv: tuple[jax.Array, ...], norms: Norms, *rest: jax.Array
) -> tuple:
    """In qkv, norms, cos and sin, by the reference."""
    cos, sin, cu_seqlens = rest
    bounds = options.scale, options.max_seqlen
    (*found, cos_grad, sin_grad), norm_grads = rope_attention_gradients(
        grad, (*_q_k_v(qkv), cos, sin), cu_seqlens, *bounds, norms, options.norm_eps, options.embed
    )
    packed = len(qkv) == 1
    qkv_grad = (jnp.stack(found, axis=1),) if packed else tuple(x[:, None] for x in found)
    return qkv_grad, norm_grads, cos_grad, sin_grad


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _qkv_gradients(
    options: _Options, grad: jax.Array, qkv: tuple[jax.Array, ...], *rest: jax.Array
) -> tuple[jax.Array, ...]:
    """The gradients in qkv, of no norms and equal heads, by kernels.

    rest: cos, sin, cu_seqlens and what was kept.
    """
    vary = vary_as(grad, *qkv, *rest)
    # Under shard_map, what is the same on several devices gets the sum of its gradients there.
    varying, sum_over_devices = jax.vjp(lambda *x: tuple(map(vary, x)), *qkv)
    bounds = {"max_seqlen": options.max_seqlen, "scale": options.scale}
    kernel = functools.partial(attention_gradients, **bounds, interpret=False)
    interpreted = functools.partial(kernel, interpret=True)

    def reference(
        grad: jax.Array, qkv: tuple[jax.Array, ...], *rest: jax.Array
    ) -> tuple[jax.Array, ...]:
        return _reference_gradients(options, grad, qkv, NO_NORMS, *rest[:3])[0]

    @jax.custom_batching.sequential_vmap
    def call(*arguments: tuple | jax.Array) -> tuple[jax.Array, ...]:
        if options.implementation == "auto":
            return platform_dependent(*arguments, cuda=kernel, default=reference)
        return platform_dependent(*arguments, cuda=kernel, cpu=interpreted)

    return sum_over_devices(call(vary(grad), varying, *map(vary, rest)))


def _gradients_forward(options: _Options, *arguments: tuple | jax.Array) -> tuple:
    return _qkv_gradients(options, *arguments), arguments


def _gradients_backward(options: _Options, arguments: tuple, grad: tuple[jax.Array, ...]) -> tuple:
    """Second derivatives, by the reference; what was kept follows from the arguments."""
    *differentiated, cu_seqlens = arguments[:5]
    kept = map(jnp.zeros_like, arguments[5:])

    def gradients(grad: jax.Array, qkv: tuple[jax.Array, ...], *angles: jax.Array) -> tuple:
        return _reference_gradients(options, grad, qkv, NO_NORMS, *angles, cu_seqlens)[0]

    _, pull = jax.vjp(gradients, *differentiated)
    return *pull(grad), None, *kept


_qkv_gradients.defvjp(_gradients_forward, _gradients_backward)


# Outside of any jit it would be traced and compiled anew at each call.
@functools.partial(jax.jit, static_argnums=0)
def _run(
    options: _Options, qkv: tuple[jax.Array, ...], norms: Norms, *rest: jax.Array
) -> jax.Array:
    """Qkv is one packed [tokens, 3, heads, head_dim], or q, k, v [tokens, heads, head_dim]."""
    qkv = qkv if len(qkv) == 1 else tuple(x[:, None] for x in qkv)
    attention = functools.partial(_attention, options, False)
    return on_own_heads(lambda *x: attention(*x)[0], qkv, norms, *rest)


def _q_k_v(qkv: tuple[jax.Array, ...]) -> Iterator[jax.Array]:
    arrays, parts = operands(qkv)
    return (x[:, part] for x, part in zip(arrays, parts, strict=True))
