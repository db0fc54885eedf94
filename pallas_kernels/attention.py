"""The public functions: check arguments, choose the kernel and how much to fuse, launch."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.checks import check_arguments
from pallas_kernels.kernels.rotate import rotate_kernel
from pallas_kernels.kernels.softmax import is_online
from pallas_kernels.kernels.stream import hoists, stream_kernel
from pallas_kernels.kernels.window import window_kernel
from pallas_kernels.launching.choose import find_launch, head_split, rotated_row, window_limit
from pallas_kernels.launching.compile import local_gpus
from pallas_kernels.launching.hopper import auto_fuse, is_specialized, rows_of
from pallas_kernels.launching.launch import run
from pallas_kernels.launching.table import next_power_of_2
from pallas_kernels.reference import rope_attention_gradients, rope_attention_reference
from pallas_kernels.sharding import check_shardings, on_own_heads

LOG2_E = 1.4426950408889634


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
) -> jax.Array:
    """Attention within segments, with the rotary embedding of Q and K inside the kernel.

    Args:
        q, k, v: [tokens, heads, head_dim], bf16, fp16 or fp32; head_dim a multiple of 8 up to 256.
        cos, sin: [tokens, rotary_dim / 2] fp32, the angles of each token, applied in the split-half
            (NeoX) form. Dims of a head behind rotary_dim pass unrotated.
        cu_seqlens: [segments + 1] int32, cumulative segment starts. Segments may be empty; tokens
            before the first and behind the last are padding. Where values decrease, which
            `check_cu_seqlens` finds, rows between them may be anything.
        max_seqlen: static upper bound on a segment's length, for which a call is compiled. None:
            the longest of cu_seqlens, which must then not be traced, rounded up to a power of two.
            Rows of a segment that is longer come out right or NaN, never wrong; their gradients are
            NaN.
        scale: static factor of the logits, 2 ** -100 to 2 ** 100; default head_dim ** -0.5.
        fuse: "qk" rotates Q and K inside the kernel, "q" rotates K in a pass of its own, "none"
            both. "auto": "qk" where one tile holds a segment, so that no row is rotated twice;
            else "none", or "q" where rotary_dim < head_dim and head_dim is a multiple of 16, but
            for long images on Hopper GPUs, see specialized.py.
        implementation: "triton" is the kernel on Pallas' Triton backend, but over long images on
            Hopper GPUs on its Mosaic GPU backend, see specialized.py (on a CPU: in Pallas'
            interpreter, which needs jax_enable_x64 off, check_vma=False under shard_map, and heads
            that are split over all axes of an explicit mesh that is set), "reference" plain jnp;
            "auto" the kernel where the computation runs on a CUDA GPU of compute capability 8.0 or
            newer, else the reference.

    Returns:
        [tokens, heads, head_dim] in the dtype of q; exactly 0 for padding.

    Raises:
        TypeError, ValueError: a type, dtype, shape or keyword is not as stated above, or an array's
            type says that it is split over devices otherwise than by heads.

    Differentiable in q, k, v, cos and sin in reverse mode: the backward pass runs through the
    reference. Under vmap the calls run one after the other. With q, k and v split by heads along
    explicit axes of a mesh, or under shard_map, there also with all arguments split by calls, each
    device runs its own.
    """
    options, (q, k, v, *angles) = _prepare(
        (q, k, v), ("q", "k", "v"), cos, sin, cu_seqlens, max_seqlen, scale, fuse, implementation
    )
    return _run(options, (q, k, v), *angles)


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
) -> jax.Array:
    """fused_rope_attention on qkv [tokens, 3, heads, head_dim], read in place.

    That is what a QKV projection writes; it is neither split nor copied. Everything else is as in
    fused_rope_attention.
    """
    options, (qkv, *angles) = _prepare(
        (qkv,), ("qkv",), cos, sin, cu_seqlens, max_seqlen, scale, fuse, implementation
    )
    return _run(options, (qkv,), *angles)


@dataclass(frozen=True)
class _Options:
    """All that is static about a call."""

    max_seqlen: int
    scale: float
    fuse: str
    implementation: str


def _prepare(
    arrays: tuple[jax.Array, ...],
    names: tuple[str, ...],
    cos: jax.Array,
    sin: jax.Array,
    cu_seqlens: jax.Array,
    max_seqlen: int | None,
    scale: float | None,
    fuse: str,
    implementation: str,
) -> tuple[_Options, list[jax.Array]]:
    """Check a call's arguments; returns all that is static about it, and its arrays as JAX's."""
    # Before numbers of 64 bits, NumPy's default, become JAX's of 32.
    check_arguments(arrays, names, cos, sin, cu_seqlens, max_seqlen, scale, fuse, implementation)
    if max_seqlen is None:
        if isinstance(cu_seqlens, jax.core.Tracer):
            raise ValueError("max_seqlen must be given where cu_seqlens is traced (by jit or vmap)")
        # A NumPy array's values are known under jit, until it becomes JAX's. Each bound is compiled
        # for, so there are to be few.
        longest = int(np.diff(np.asarray(cu_seqlens, np.int64)).max(initial=0))
        max_seqlen = min(next_power_of_2(longest), arrays[0].shape[0])
    *arrays, cos, sin, cu_seqlens = map(jnp.asarray, (*arrays, cos, sin, cu_seqlens))
    check_shardings(arrays, names, cos, sin, cu_seqlens)
    max_seqlen, head_dim = int(max_seqlen), arrays[0].shape[-1]
    if fuse == "auto":
        tokens, *_, heads, head_dim = arrays[0].shape
        fuse = auto_fuse(arrays[0].dtype, head_dim, 2 * cos.shape[1], max_seqlen, tokens, heads)
    if implementation == "auto" and not have_tensor_cores():
        implementation = "reference"
    scale = head_dim**-0.5 if scale is None else float(scale)
    return _Options(max_seqlen, scale, fuse, implementation), [*arrays, cos, sin, cu_seqlens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    options: _Options,
    qkv: tuple[jax.Array, ...],
    cos: jax.Array,
    sin: jax.Array,
    cu_seqlens: jax.Array,
) -> jax.Array:
    """Qkv is one packed [tokens, 3, heads, head_dim], or q, k, v [tokens, 1, heads, head_dim]."""
    if qkv[0].size == 0 or cu_seqlens.shape[0] == 1:
        return jnp.zeros_like(qkv[-1][:, -1])  # varying over a mesh as v does

    @jax.custom_batching.sequential_vmap
    def attend(qkv: tuple, cos: jax.Array, sin: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
        arguments = (qkv, cos, sin, cu_seqlens)
        reference = functools.partial(_reference, options)
        kernel = functools.partial(_kernel, options, False)
        interpreted = functools.partial(_kernel, options, True)
        if options.implementation == "reference":
            return reference(*arguments)
        if options.implementation == "auto":
            return jax.lax.platform_dependent(*arguments, cuda=kernel, default=reference)
        return jax.lax.platform_dependent(*arguments, cuda=kernel, cpu=interpreted)

    return attend(qkv, cos, sin, cu_seqlens)


def have_tensor_cores() -> bool:
    """Whether all GPUs here have them for bf16, which came with compute capability 8.0."""
    return all(float(gpu.compute_capability) >= 8.0 for gpu in local_gpus())


def _forward(options: _Options, *arguments: tuple | jax.Array) -> tuple[jax.Array, tuple]:
    return _attention(options, *arguments), arguments


def _backward(options: _Options, arguments: tuple, grad: jax.Array) -> tuple:
    """The reference's gradients, from the saved arguments."""
    qkv, *rest = arguments
    *found, cos_grad, sin_grad = rope_attention_gradients(
        grad, *_q_k_v(qkv), *rest, options.scale, options.max_seqlen
    )
    packed = len(qkv) == 1
    qkv_grad = (jnp.stack(found, axis=1),) if packed else tuple(x[:, None] for x in found)
    return qkv_grad, cos_grad, sin_grad, None


_attention.defvjp(_forward, _backward)


# Outside of any jit it would be traced and compiled anew at each call.
@functools.partial(jax.jit, static_argnums=0)
def _run(options: _Options, qkv: tuple[jax.Array, ...], *rest: jax.Array) -> jax.Array:
    """Qkv is one packed [tokens, 3, heads, head_dim], or q, k, v [tokens, heads, head_dim]."""
    qkv = qkv if len(qkv) == 1 else tuple(x[:, None] for x in qkv)
    return on_own_heads(functools.partial(_attention, options), qkv, *rest)


def _reference(
    options: _Options, qkv: tuple, cos: jax.Array, sin: jax.Array, cu_seqlens: jax.Array
) -> jax.Array:
    scale, max_seqlen = options.scale, options.max_seqlen
    return rope_attention_reference(*_q_k_v(qkv), cos, sin, cu_seqlens, scale, max_seqlen)


def _q_k_v(qkv: tuple[jax.Array, ...]) -> Iterator[jax.Array]:
    arrays, parts = _operands(qkv)
    return (x[:, part] for x, part in zip(arrays, parts, strict=True))


def _operands(qkv: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], tuple[int, int, int]]:
    """The arrays that hold q, k and v, and the part of each that does."""
    return (qkv * 3, (0, 1, 2)) if len(qkv) == 1 else (qkv, (0, 0, 0))


def _kernel(
    options: _Options,
    interpret: bool,
    qkv: tuple[jax.Array, ...],
    cos: jax.Array,
    sin: jax.Array,
    cu_seqlens: jax.Array,
) -> jax.Array:
    (q, k, v), (q_part, k_part, v_part) = _operands(qkv)
    tokens, _, heads, head_dim = v.shape
    shape = v.dtype, head_dim, options.max_seqlen, tokens, heads
    specialized = options.fuse == "none" and not interpret and is_specialized(*shape)
    rows = rows_of(tokens) if specialized else tokens
    if options.fuse == "none" and len(qkv) == 1:
        q = k = _rotate(q, q_part, 2, cos, sin, rows, interpret)
        q_part, k_part = 0, 1
    else:
        if options.fuse == "none":
            q, q_part = _rotate(q, q_part, 1, cos, sin, rows, interpret), 0
        if options.fuse != "qk":
            k, k_part = _rotate(k, k_part, 1, cos, sin, rows, interpret), 0
    if specialized:
        from pallas_kernels.launching.hopper_launch import specialized_attention

        parts, scale_log2 = (q_part, k_part, v_part), options.scale * LOG2_E
        longest = min(options.max_seqlen, tokens)
        return specialized_attention(q, k, v, cu_seqlens, parts, scale_log2, longest)
    segments = cu_seqlens.shape[0] - 1
    split = head_split(head_dim)
    static = {
        "parts": (q_part, k_part, v_part),
        "scale_log2": options.scale * LOG2_E,
        "main": split.main,
        "tail": split.tail,
        "rotate_q": options.fuse != "none",
        "rotate_k": options.fuse == "qk",
        "interpreted": interpret,
    }
    if options.max_seqlen <= window_limit(v.dtype, head_dim):
        launch = find_launch("window", v.dtype, head_dim, options.max_seqlen, tokens * heads)
        programs = segments * heads
        kernel = functools.partial(window_kernel, **static, block=launch.block)
    else:
        name = "rotating_stream" if options.fuse == "qk" else "stream"
        launch = find_launch(name, v.dtype, head_dim, options.max_seqlen, tokens * heads)
        programs = pl.cdiv(tokens, launch.block) * heads
        kernel = functools.partial(
            stream_kernel,
            **static,
            online=is_online(v.dtype, head_dim, options.max_seqlen),
            block=launch.block,
            block_k=launch.block_k,
        )
    shape = (tokens, 1, heads, head_dim)
    operands = q, k, v, cos, sin, cu_seqlens
    disable_licm = not hoists(head_dim, v.dtype)
    return run(kernel, programs, shape, v.dtype, launch, interpret, operands, disable_licm)[:, 0]


def _rotate(
    x: jax.Array,
    first_part: int,
    parts: int,
    cos: jax.Array,
    sin: jax.Array,
    rows: int,
    interpret: bool,
) -> jax.Array:
    """So many parts of x rotated, [rows, parts, row] as the attention kernels read them."""
    tokens, _, heads, head_dim = x.shape
    launch = find_launch("rotate", x.dtype, head_dim, 1, tokens * heads)
    split = head_split(head_dim)
    kernel = functools.partial(
        rotate_kernel,
        first_part=first_part,
        main=split.main,
        tail=split.tail,
        block=launch.block,
        group=launch.block_k,
    )
    programs = pl.cdiv(tokens, launch.block) * parts * pl.cdiv(heads, launch.block_k)
    shape = (rows, parts, rotated_row(heads, head_dim))
    return run(kernel, programs, shape, x.dtype, launch, interpret, (x, cos, sin))
