"""The warp-specialized kernel by itself: in the interpreter, and lowered for CUDA."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as mosaic

from pallas_kernels.launching import launch
from pallas_kernels.launching.choose import head_split, rotated_row, rows_of, tiles_fit
from pallas_kernels.launching.compile import HAVE_MOSAIC
from pallas_kernels.launching.plan import LOG2_E
from tests.kernel_cases import RELATIVE_RMS
from tests.pallas_kernels.launching.test_lowering import cuda_device

pytestmark = [
    pytest.mark.skipif(not HAVE_MOSAIC, reason="the kernel is for JAX 0.11.2 and 0.12"),
    # From NumPy, by which the interpreter computes what overflows or is no number.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]


def draw(tokens, heads, head_dim, dtype="bfloat16", gain=1.0, seed=0):
    """Q, K and V [tokens, 3, heads, head_dim]."""
    qkv = np.random.default_rng(seed).standard_normal((tokens, 3, heads, head_dim))
    return np.array(jnp.asarray(gain * qkv, dtype))


def rotated(qkv):
    """Q and K as rotate_kernel lays them out [rows, 2, row], by an angle of 0.

    It interleaves the halves too, which Q K^T is the same without. Rows of no token hold NaN.
    """
    tokens, _, heads, head_dim = qkv.shape
    main, tail = head_split(head_dim)
    x = np.zeros((tokens, 2, heads, main + tail), qkv.dtype)
    x[..., :head_dim] = qkv[:, :2]
    parts = x[..., :main].reshape(tokens, 2, -1), x[..., main:].reshape(tokens, 2, -1)
    x = np.concatenate(parts, axis=-1)
    x = np.pad(x, ((0, 0), (0, 0), (0, rotated_row(heads, head_dim) - x.shape[-1])))
    rows = ((0, rows_of(tokens) - tokens), (0, 0), (0, 0))
    return np.pad(x, rows, constant_values=np.nan)


@functools.partial(jax.jit, static_argnums=(3, 4))
def run(q_k, v, cu_seqlens, scale, interpret):
    q, k = q_k if isinstance(q_k, tuple) else (q_k, q_k)
    parts = (0, 0, 0) if isinstance(q_k, tuple) else (0, 1, 2)
    longest = min(v.shape[0], 128)  # a guess that is right in some tests
    scale_log2 = scale * LOG2_E
    return launch.run_hopper_stream(q, k, v, cu_seqlens, parts, scale_log2, longest, interpret)


def attend(qkv, cu_seqlens, scale=None):
    """The result in fp64."""
    cu_seqlens = jnp.asarray(cu_seqlens, jnp.int32)
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    interpret = jax.default_backend() != "gpu"
    out = run(jnp.asarray(rotated(qkv)), jnp.asarray(qkv), cu_seqlens, scale, interpret)
    return np.asarray(out).astype(np.float64)


def oracle(qkv, cu_seqlens, scale=None):
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    out = np.zeros((qkv.shape[0], *qkv.shape[2:]))
    for start, end in itertools.pairwise(cu_seqlens):
        if start < end:
            q, k, v = qkv[start:end].astype(np.float64).transpose(1, 2, 0, 3)
            logits = q @ k.swapaxes(1, 2) * scale
            p = np.exp(logits - logits.max(-1, keepdims=True))
            out[start:end] = (p / p.sum(-1, keepdims=True) @ v).swapaxes(0, 1)
    return out


def check(qkv, cu_seqlens, scale=None):
    """Hold the result to the oracle, and tokens of no segment to exact zeros."""
    out, expected = attend(qkv, cu_seqlens, scale), oracle(qkv, cu_seqlens, scale)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(out), finite)
    error, whole = np.linalg.norm((out - expected)[finite]), np.linalg.norm(expected[finite])
    assert error <= RELATIVE_RMS[str(qkv.dtype)] * whole
    token = np.arange(len(qkv))
    assert (out[(token < cu_seqlens[0]) | (token >= cu_seqlens[-1])] == 0).all()
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [(2, 72), (1, 80), (2, 88), (1, 96), (1, 112), (1, 128)]
)
def test_one_segment_of_more_keys_than_tiles(heads, head_dim, dtype):
    check(draw(264, heads, head_dim, dtype), [0, 264])


@pytest.mark.parametrize(
    "cu_seqlens",
    [
        [0, 128],
        [0, 0, 64, 64, 64, 128, 256],
        [3, 11, 11, 150, 201],  # at odd rows, with padding before and behind
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 137, 138, 266],
        [200, 201],
        [130, 130],
        [0, 0, 0],
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [72, 80])
def test_segments(head_dim, cu_seqlens):
    tokens = max(128, -(-cu_seqlens[-1] // 8) * 8)
    check(draw(tokens, 2, head_dim), cu_seqlens)


@pytest.mark.parametrize("tokens", [129, 196, 263])
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 72), (1, 80), (1, 128)])
def test_any_number_of_tokens(heads, head_dim, tokens):
    """Their rows end within eights, with and without tokens of no segment there."""
    qkv = draw(tokens, heads, head_dim)
    qkv[70, 0] *= 4000  # a misfit
    check(qkv, [0, 67, tokens])
    check(qkv, [0, 67, tokens - 1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gain", [4, 16, 60])
def test_large_logits(gain, dtype):
    """Most rows' reference does not fit them, or is too large to be one."""
    check(draw(264, 1, 80, dtype, gain), [5, 133, 264])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_that_their_reference_does_not_fit(dtype):
    """Among the first keys all logits are small; some rows have one of 200 among the others."""
    qkv = draw(200, 2, 72, dtype)
    qkv[:64, 1] /= 64
    qkv[40:60, 0] *= 16
    check(qkv, [0, 200])


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 6e4), ("bfloat16", 1e30)])
def test_large_values(dtype, largest):
    """In bf16 sums overflow where later keys' logits pass those of a segment's first."""
    qkv = draw(200, 2, 72).astype(np.float64) * np.array([4, 4, 1])[:, None, None]
    qkv[:, 2] *= largest / np.abs(qkv[:, 2]).max()
    check(np.array(jnp.asarray(qkv, dtype)), [0, 33, 200])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("broken", [(0, 67), (67, 201), (201, 264)])
def test_a_broken_segment_breaks_no_other(broken, value):
    qkv = draw(264, 1, 80)
    qkv[slice(*broken)] = value
    out = check(qkv, [0, 67, 201, 264])
    assert not np.isfinite(out[slice(*broken)]).any()


def test_a_broken_head_breaks_no_other():
    """Nor one whose columns the tile of another has."""
    qkv = draw(136, 4, 72)
    qkv[:, 2, 1::2] = np.nan
    check(qkv, [0, 136])


@pytest.mark.parametrize(
    "cu_seqlens",
    [
        [-5, 4, -9, 300, 300],
        [0, 40, 2**31 - 1, 50, 60],
        [256, 200, 100, 50, 0],
        [0, 200, 3, 29, 1],
        [-(2**31), 2**31 - 1, -(2**31), 2**31 - 1, 0],
        [2**31 - 1, -(2**31), 0, -(2**31), -(2**31)],
        [257, 258, 259, 260],
        [-4, -3, -2, -1],
    ],
    ids=str,
)
def test_any_cu_seqlens_is_safe(cu_seqlens):
    qkv = draw(256, 1, 80)
    out = attend(qkv, cu_seqlens)
    assert (np.abs(out) <= np.abs(qkv[:, 2].astype(np.float64)).max() * (1 + 2**-7)).all()


def matmul_in_fp64(a, b, dtype):
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)


def test_the_same_bits_of_arrays_apart_and_at_another_place(monkeypatch):
    """At any that is as far from a multiple of eight rows."""
    # The interpreter multiplies by NumPy's BLAS. OpenBLAS's kernels for AMD's CPUs and Haswell sum
    # in an order that depends on where in its tile a row is, those for Intel's AVX-512 do not. Sums
    # in fp64, rounded, are the same in any order here. In fp16 more of the other sums' bits show.
    monkeypatch.setattr(np, "matmul", matmul_in_fp64)
    draw_half = functools.partial(draw, heads=2, head_dim=72, dtype="float16")
    qkv, cu_seqlens = draw_half(200), jnp.array([0, 131, 200], jnp.int32)
    before = attend(qkv, cu_seqlens)
    q, k = (jnp.asarray(rotated(qkv)[:, i : i + 1]) for i in range(2))
    v = jnp.asarray(qkv[:, 2:])
    apart = run((q, k), v, cu_seqlens, 72**-0.5, jax.default_backend() != "gpu")
    np.testing.assert_array_equal(np.asarray(apart).astype(np.float64), before)
    moved = np.concatenate([draw_half(72, seed=1), qkv, draw_half(16, seed=2)])
    np.testing.assert_array_equal(attend(moved, [3, 72, 203, 272, 280])[72:272], before)


@pytest.mark.parametrize("head_dim", [80, 128])
def test_four_warps_load_what_one_does(monkeypatch, head_dim):
    """As they do for arrays that vary over a mesh."""
    qkv, cu_seqlens = draw(264, 1, head_dim), [3, 67, 264]
    qkv[100, 0] *= 4000  # a misfit
    expected = attend(qkv, cu_seqlens)
    monkeypatch.setattr(launch, "varying_axes", lambda *_: {"x"})
    jax.clear_caches()
    np.testing.assert_array_equal(check(qkv, cu_seqlens), expected)
    jax.clear_caches()


def test_groups_of_warps_do_not_race(monkeypatch):
    """Loads, products and stores, as the interpreter orders them by the barriers alone."""
    if jax.default_backend() == "gpu":
        pytest.skip("nothing is interpreted")
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    params = mosaic.InterpretGPUParams
    monkeypatch.setattr(mosaic, "InterpretGPUParams", functools.partial(params, detect_races=True))
    jax.clear_caches()
    qkv = draw(256, 1, 80)
    qkv[100:, 0] *= 4000  # misfits in three groups of four
    check(qkv, [3, 140, 140, 256])
    assert not interpret_pallas_call.get_races().races_found
    jax.clear_caches()


def lower(tokens, heads, head_dim, dtype="bfloat16", packed=True):
    rows, part = rotated_row(heads, head_dim), 2 if packed else 1
    q_k = jax.ShapeDtypeStruct((rows_of(tokens), part, rows), dtype)
    v = jax.ShapeDtypeStruct((tokens, 3 if packed else 1, heads, head_dim), dtype)
    cu_seqlens = jax.ShapeDtypeStruct((5,), jnp.int32)
    with cuda_device():
        traced = run.trace(q_k if packed else (q_k, q_k), v, cu_seqlens, 0.1, False)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("head_dim", range(72, 129, 8))
@pytest.mark.parametrize("tokens", [128, 136, 9213, 9216])
def test_what_fits_lowers_for_a_gpu(tokens, head_dim):
    heads = 15 if head_dim % 16 == 0 else 14
    assert tiles_fit(tokens, heads, head_dim)
    assert lower(tokens, heads, head_dim).count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_arrays_are_read_in_place(dtype, packed):
    with jax.enable_x64(True):
        module = lower(1024, 16, 80, dtype, packed)
    for copy in ("slice", "gather", "transpose", "concatenate", "convert", "pad", "copy"):
        assert f"stablehlo.{copy}" not in module


def test_v_alone_is_copied_for_rows_by_eights():
    module = lower(1020, 16, 80)
    assert module.count("stablehlo.pad") == module.count("stablehlo.slice") == 1
