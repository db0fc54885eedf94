"""Every variant of the kernels lowers for CUDA, on any machine.

Pallas' interpreter takes what the Triton backend refuses (tiles whose sides are no powers of two,
slices that pass an end), so that interpreting alone proves nothing about a GPU.
"""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels.launching import choose
from pallas_kernels.launching.compile import compiling_by
from pallas_kernels.launching.table import Device, Gpu, Launch, Row, Table
from tests.kernel_contract import STREAM, WINDOW
from tests.pallas_kernels.no_gpu import cuda_device, hide_gpus, products

TOKENS, HEADS, SEGMENTS = 1024, 16, 16
FUSED = ("qk", "q", "none")


@pytest.fixture(autouse=True, scope="module")
def no_gpu():
    """The same is lowered on every machine."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        hide_gpus(monkeypatch)
        yield
    jax.clear_caches()


@pytest.fixture
def gpu(request, monkeypatch):
    """Whose launches are taken; without one the default's."""
    monkeypatch.setattr(choose, "gpu", lambda: request.param)
    jax.clear_caches()  # a machine's GPU never changes: nothing is traced anew for another


H200 = Gpu("NVIDIA H200", "9.0")


def on_each_gpu(names, calls):
    """Run a test by the default's launches, and by those of the GPU that is in the table.

    names: of the arguments, the first of which are dtype and head_dim. In fp32, and for gradients
    of most heads above 128, that GPU takes the default's launches.
    """
    own = [call for call in calls if call[0] != jnp.float32 and call[1] <= 128]
    cases = [*((None, *call) for call in calls), *((H200, *call) for call in own)]
    return pytest.mark.parametrize(("gpu", *names), cases, indirect=["gpu"])


def test_launches_of_the_gpu_in_the_table():
    """Those that `on_each_gpu` relies on."""
    table = json.loads(choose.TABLE_FILE.read_text())
    launches, default = (table[name]["launches"] for name in ("NVIDIA H200", "default"))
    own = [row for row in launches if "columns" not in row and row not in default]
    assert {row["operands"] for row in own} == {"half"}
    for kernel in ("stream_backward_q", "stream_backward_kv", "window_backward"):
        assert all(row["max_head_dim"] <= 128 for row in launches if row["kernel"] == kernel)


def lower(
    head_dim=80, rotary_dim=None, dtype=jnp.bfloat16, packed=True, heads=HEADS, tokens=TOKENS,
    k_heads=None, norms="", through=lambda function: function, **options,
):  # fmt: skip
    """The module that JAX would give to a GPU's compiler, as text.

    norms: of what, as letters. through: makes what is lowered of the function.
    """
    angles = jax.ShapeDtypeStruct((tokens, (rotary_dim or head_dim) // 2), jnp.float32)
    cu_seqlens = jax.ShapeDtypeStruct((SEGMENTS + 1,), jnp.int32)
    if packed:
        function = pallas_kernels.fused_rope_attention_qkvpacked
        qkv = (jax.ShapeDtypeStruct((tokens, 3, heads, head_dim), dtype),)
    else:
        function = pallas_kernels.fused_rope_attention
        counts = heads, k_heads or heads, k_heads or heads
        qkv = tuple(jax.ShapeDtypeStruct((tokens, n, head_dim), dtype) for n in counts)
    weights = {f"{name}_norm": jax.ShapeDtypeStruct((head_dim,), dtype) for name in norms}
    function = functools.partial(function, **{"implementation": "kernel"} | options)
    function = jax.jit(through(function))
    with cuda_device():
        traced = function.trace(*qkv, angles, angles, cu_seqlens, **weights)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels(module):
    return module.count("__gpu$xla.gpu.ptx") + module.count("__gpu$xla.gpu.triton")


# Each way of fusing in each kernel, and each length of window; of fp32 the longest is WINDOW.
@on_each_gpu(
    ("dtype", "head_dim", "max_seqlen", "fuse"),
    [
        *((jnp.bfloat16, 80, WINDOW, "qk"), (jnp.bfloat16, 80, 64, "qk")),
        *((jnp.bfloat16, 80, 64, "q"), (jnp.bfloat16, 80, 128, "none")),
        (jnp.float32, 80, WINDOW, "qk"),
        *((dtype, 80, STREAM, x) for dtype in (jnp.bfloat16, jnp.float32) for x in FUSED),
    ],
)
def test_every_kernel_dtype_and_fusion(gpu, dtype, head_dim, max_seqlen, fuse):
    module = lower(head_dim, dtype=dtype, max_seqlen=max_seqlen, fuse=fuse)
    assert kernels(module) == (1 if fuse == "qk" else 2)


@pytest.mark.parametrize("head_dim", [8, 24, 56, 64, 80, 96, 120, 128, 136, 200, 256])
def test_every_head_dim(head_dim):
    assert kernels(lower(head_dim, dtype=jnp.float16, max_seqlen=WINDOW, fuse="qk")) == 1
    assert kernels(lower(head_dim, dtype=jnp.float16, max_seqlen=STREAM, fuse="q")) == 2


@pytest.mark.parametrize(
    ("gpu", "head_dim", "dtype", "max_seqlen", "fuse", "count"),
    [
        (None, 512, jnp.float32, 64, "qk", 2),  # of partial logits, and of the result
        (None, 520, jnp.bfloat16, WINDOW, "none", 3),
        (None, 16384, jnp.float32, STREAM, "qk", 1),
        (None, 264, jnp.float16, STREAM, "none", 2),
        (H200, 512, jnp.bfloat16, STREAM, "none", 2),  # the whole head in a tile
    ],
    indirect=["gpu"],
)
def test_wide_heads(gpu, head_dim, dtype, max_seqlen, fuse, count):
    options = {"heads": 1, "max_seqlen": max_seqlen, "fuse": fuse}
    assert kernels(lower(head_dim, dtype=dtype, **options)) == count


@pytest.mark.parametrize("max_seqlen", [WINDOW, STREAM])
def test_positions(max_seqlen):
    positions = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    cu_seqlens = jax.ShapeDtypeStruct((SEGMENTS + 1,), jnp.int32)
    qkv = jax.ShapeDtypeStruct((TOKENS, 3, HEADS, 72), jnp.bfloat16)

    def call(qkv, cu_seqlens, positions):
        return pallas_kernels.fused_sinusoidal_attention_qkvpacked(
            qkv, None, None, cu_seqlens, positions=positions, max_seqlen=max_seqlen, fuse="qk",
            implementation="kernel",
        )  # fmt: skip

    with cuda_device():
        traced = jax.jit(call).trace(qkv, cu_seqlens, positions)
        assert kernels(traced.lower(lowering_platforms=("cuda",)).as_text()) == 1


def gradients(function):
    """A function's gradients in q, k and v, or in qkv."""

    def pulled(*arguments):
        qkv, rest = arguments[:-3], arguments[-3:]
        result, pull = jax.vjp(lambda *x: function(*x, *rest), *qkv)
        return pull(jnp.ones_like(result))

    return pulled


@on_each_gpu(
    ("dtype", "head_dim", "rotary_dim", "max_seqlen", "packed"),
    [
        (jnp.bfloat16, 80, None, 64, True),
        (jnp.bfloat16, 72, 70, 16, False),
        (jnp.float16, 256, 128, 64, False),
        (jnp.float16, 128, None, 128, True),
        (jnp.float32, 8, None, 32, True),
    ],
)
def test_gradients(gpu, dtype, head_dim, rotary_dim, max_seqlen, packed):
    """Those in q, k and v by one kernel, without the result, and without the angles' beside it."""
    options = {"packed": packed, "max_seqlen": max_seqlen, "through": gradients}
    module = lower(head_dim, rotary_dim, dtype, **options)
    assert kernels(module) == 1
    assert "window_backward_kernel" in module
    assert "stablehlo.while" not in module


@on_each_gpu(
    ("dtype", "head_dim", "rotary_dim", "packed", "batch_invariant"),
    [
        (jnp.bfloat16, 80, None, True, False),
        (jnp.bfloat16, 72, 70, False, True),
        (jnp.float16, 256, 128, False, False),
        (jnp.float16, 128, None, True, False),
        (jnp.float32, 256, None, True, False),
    ],
)
def test_gradients_of_long_segments(gpu, dtype, head_dim, rotary_dim, packed, batch_invariant):
    """By two kernels behind those of the result, each behind its rotations."""
    options = {"packed": packed, "max_seqlen": STREAM, "through": gradients, "fuse": "none"}
    options["batch_invariant"] = batch_invariant
    module = lower(head_dim, rotary_dim, dtype, **options)
    rotations, windows = 1 if packed else 2, 1 if batch_invariant else 0
    # Those of short segments rotate what they read too.
    assert kernels(module) == 2 * rotations + 3 + windows * (1 + rotations)
    assert "stream_backward_q_kernel" in module
    assert "stream_backward_kv_kernel" in module
    assert "stablehlo.while" not in module


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 40), (80, 70), (72, 66), (128, 2)])
def test_partial_rotation(head_dim, rotary_dim):
    for max_seqlen, fuse in ((WINDOW, "qk"), (STREAM, "none")):
        assert kernels(lower(head_dim, rotary_dim, max_seqlen=max_seqlen, fuse=fuse)) >= 1


@pytest.mark.parametrize("heads", [1, 7, 12])
def test_any_number_of_heads(heads):
    assert kernels(lower(heads=heads, packed=False, max_seqlen=64)) == 1


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "max_seqlen", "fuse", "norms", "count"),
    [
        (80, None, 64, "qk", "qk", 1),
        (72, 36, 64, "qk", "k", 1),
        (80, None, STREAM, "none", "qk", 3),
        (80, 70, STREAM, "q", "q", 2),
        (64, None, STREAM, "qk", "qk", 2),  # K is normalised beforehand
        (80, None, STREAM, "qk", "", 1),
    ],
)
def test_groups_and_norms(head_dim, rotary_dim, max_seqlen, fuse, norms, count):
    options = {"max_seqlen": max_seqlen, "fuse": fuse, "norms": norms}
    assert kernels(lower(head_dim, rotary_dim, packed=False, k_heads=4, **options)) == count
    if max_seqlen == STREAM and fuse == "none":  # both parts by one launch, but for one norm alone
        for norms, count in (("qk", 2), ("q", 3)):
            assert kernels(lower(head_dim, **options | {"norms": norms})) == count


@pytest.mark.parametrize(("fuse", "max_seqlen"), [("qk", WINDOW), ("none", STREAM)])
def test_where_integers_have_64_bits_by_default(fuse, max_seqlen):
    with jax.enable_x64(True):
        assert kernels(lower(fuse=fuse, max_seqlen=max_seqlen)) >= 1


@pytest.mark.parametrize("precision", ["highest", "TF32_TF32_F32", "BF16_BF16_F32_X3"])
@pytest.mark.parametrize("max_seqlen", [WINDOW, STREAM])
@pytest.mark.parametrize(
    ("dtype", "own"),
    [(jnp.bfloat16, jax.lax.Precision.DEFAULT), (jnp.float32, jax.lax.Precision.HIGHEST)],
)
def test_products_are_the_kernels_own_choice(dtype, own, max_seqlen, precision):
    """A program may ask for others by default: bf16 ones would take longer, fp32 ones be tf32."""
    attend = functools.partial(
        pallas_kernels.fused_rope_attention_qkvpacked,
        max_seqlen=max_seqlen,
        implementation="kernel",
    )
    shapes = ((TOKENS, 3, HEADS, 80), dtype), ((TOKENS, 40), jnp.float32)
    qkv, angles = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    cu_seqlens = jax.ShapeDtypeStruct((SEGMENTS + 1,), jnp.int32)
    with cuda_device(), jax.default_matmul_precision(precision):
        traced = jax.make_jaxpr(attend)(qkv, angles, angles, cu_seqlens)
    assert {eqn.params["precision"] for eqn in products(traced)} == {(own, own)}


def test_another_table_for_a_while():
    """What JAX has traced of a call serves no other table."""
    wide = Row("window", Launch(64, 64, num_warps=8, num_stages=1), max_length=64)
    table = Table({"default": Device(None, (wide,))})
    with compiling_by("xla"):  # which leaves the launch legible
        before = lower(max_seqlen=64)
        with choose.launching_by(table):
            assert "num_warps = 8" in lower(max_seqlen=64)
        assert "num_warps = 8" not in before
        assert lower(max_seqlen=64) == before


def test_packed_qkv_is_read_in_place():
    module = lower(max_seqlen=64)
    for copy in ("stablehlo.slice", "stablehlo.gather", "stablehlo.transpose", "stablehlo.concat"):
        assert copy not in module


def test_auto_lowers_to_the_kernel():
    assert kernels(lower(max_seqlen=64, implementation="auto")) == 1


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this JAX deprecates nothing of it")
@pytest.mark.parametrize(("max_seqlen", "fuse"), [(WINDOW, "qk"), (STREAM, "q"), (STREAM, "none")])
def test_what_is_left_of_a_deprecated_backend(max_seqlen, fuse):
    """Windows, streams and rotations; of the Mosaic backend nothing, or its tests would fail."""
    with pytest.warns(DeprecationWarning, match="The Pallas Triton backend is deprecated"):
        text = lower(max_seqlen=max_seqlen, fuse=fuse)
    assert text.count("xla.gpu.triton") == (1 if fuse == "qk" else 2)
