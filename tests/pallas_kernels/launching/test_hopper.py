"""When the warp-specialized kernel is taken; what it computes is in test_hopper_stream.py."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import pallas_kernels
from compare.stress.inputs import ON_GPU, draw_for
from compare.stress.launched import WARP_SPECIALIZED, in_jax
from pallas_kernels.launching import choose, devices, plan
from pallas_kernels.launching.compile import HAVE_MOSAIC, compiling_by
from pallas_kernels.launching.table import Table
from tests.kernel_cases import assert_accurate, make_case

SHAPE = {"dtype": jnp.bfloat16, "head_dim": 80, "max_seqlen": 9216, "tokens": 9216, "heads": 16}


def takes(**changes):
    return choose.is_warp_specialized(**SHAPE | changes)


@pytest.fixture
def on(monkeypatch):
    """Make this a machine with GPUs of compute capabilities, and JAX one that has Mosaic."""

    def put(*capabilities):
        gpus = tuple(SimpleNamespace(compute_capability=c) for c in capabilities)
        monkeypatch.setattr(choose, "local_gpus", lambda: gpus)
        monkeypatch.setattr(choose, "HAVE_MOSAIC", True)

    return put


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"dtype": jnp.float16}, {"head_dim": 72}, {"head_dim": 128},
        {"max_seqlen": 768}, {"max_seqlen": 768, "head_dim": 128},  # in many segments
        {"tokens": 1936, "max_seqlen": 1936},  # 256 programs, of two waves' 264
        {"tokens": 3136, "max_seqlen": 3136},  # 400 programs, of four waves' 528
        {"tokens": 2304, "max_seqlen": 2304, "head_dim": 128},  # 288 programs, of three waves' 396
        {"tokens": 2304, "max_seqlen": 2304, "head_dim": 72},
        {"tokens": 9220, "max_seqlen": 3072},  # not by eights
    ],
)  # fmt: skip
def test_long_images_of_wide_heads_take_it(on, changes):
    on("9.0")
    assert takes(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": jnp.float32}, {"head_dim": 64}, {"head_dim": 136},
        {"max_seqlen": 767}, {"max_seqlen": 767, "head_dim": 128},
        {"tokens": 2304, "max_seqlen": 2304},
        {"tokens": 2304, "max_seqlen": 2304, "head_dim": 112},
        {"tokens": 2112, "max_seqlen": 2112, "head_dim": 128},  # 272 of 396
        {"tokens": 9220, "max_seqlen": 3071},
        {"head_dim": 72, "heads": 15},  # whose tiles do not fit
    ],
)  # fmt: skip
def test_others_do_not(on, changes):
    on("9.0")
    assert not takes(**changes)


@pytest.mark.parametrize("capabilities", [(), ("8.0",), ("10.0",), ("9.0", "10.0")])
def test_nor_do_other_gpus(on, capabilities):
    on(*capabilities)
    assert not takes()


@pytest.mark.parametrize(("capability", "fuse"), [("9.0", "none"), ("8.0", "q")])
def test_q_is_rotated_beforehand_for_it_however_little_rotates(on, capability, fuse):
    on(capability)
    assert choose.auto_fuse(rotary_dim=40, **SHAPE) == fuse


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_batch_invariant_calls_go_without_it(on, monkeypatch, batch_invariant):
    """Whether it is taken follows from how much is in a call."""
    on("9.0")
    launched = []

    def launch(q, k, v, *rest):
        launched.append(v.shape)
        return (jnp.zeros_like(v[:, 0]),)

    monkeypatch.setattr(plan, "run_hopper_stream", launch)
    options = {"fuse": "none", "batch_invariant": batch_invariant}
    attend = functools.partial(
        pallas_kernels.fused_rope_attention,
        max_seqlen=9216, implementation="kernel", **options,
    )  # fmt: skip
    qkv = (jax.ShapeDtypeStruct((9224, 16, 80), jnp.bfloat16),) * 3  # of no other test
    angles = jax.ShapeDtypeStruct((9224, 40), jnp.float32)
    jax.eval_shape(attend, *qkv, angles, angles, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert len(launched) == (not batch_invariant)
    monkeypatch.setattr(choose, "HAVE_TRITON", False)  # then nothing else serves them
    assert choose.has_kernel(**SHAPE, k_heads=16, **options) == (not batch_invariant)


@pytest.mark.parametrize(
    ("capabilities", "have"),
    [((), True), (("8.0",), True), (("7.5",), False), (("9.0", "7.5"), False), (("10.0",), True)],
)
def test_the_kernels_are_for_tensor_cores_of_bf16(monkeypatch, capabilities, have):
    gpus = tuple(SimpleNamespace(compute_capability=c) for c in capabilities)
    monkeypatch.setattr(devices, "local_gpus", lambda: gpus)
    assert devices.have_tensor_cores() == have


def test_a_gpu_whose_kernels_xla_compiles_has_launches_of_its_own(monkeypatch):
    one = SimpleNamespace(device_kind="H", compute_capability="9.0")
    monkeypatch.setattr(choose, "local_gpu", lambda: one)
    with compiling_by("xla"):
        assert choose.gpu() == ("H by XLA", "9.0 by XLA")


def test_launches_of_a_table_may_be_without_it(on):
    on("9.0")
    with choose.launching_by(Table.read(choose.TABLE_FILE), warp_specialized=False):
        assert not takes()
    assert takes()


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "fit"),
    [
        (128, 1, 80, True), (136, 2, 72, True), (1024, 16, 128, True), (1024, 15, 72, False),
        (1021, 16, 80, True), (120, 16, 80, False), (1024, 16, 64, False), (1024, 16, 136, False),
    ],
)  # fmt: skip
def test_what_fits(tokens, heads, head_dim, fit):
    assert choose.tiles_fit(tokens, heads, head_dim) == fit


@pytest.mark.skipif(not HAVE_MOSAIC, reason="the kernel is for JAX 0.11.2 and 0.12")
@pytest.mark.parametrize("implementation", ["auto", "kernel"])
def test_under_shard_map_its_result_varies_as_the_reference_s_does(on, implementation):
    on("9.0")
    heads, everywhere = PartitionSpec(None, None, "x"), PartitionSpec()

    def attend(*arguments):
        return pallas_kernels.fused_rope_attention_qkvpacked(
            *arguments, max_seqlen=9216, implementation=implementation
        )

    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(
        attend, mesh=mesh,
        in_specs=(heads, everywhere, everywhere, everywhere), out_specs=PartitionSpec(None, "x"),
    )  # fmt: skip
    angles = jax.ShapeDtypeStruct((9216, 40), jnp.float32)
    qkv = jax.ShapeDtypeStruct((9216, 3, 32, 80), jnp.bfloat16)
    traced = jax.make_jaxpr(split)(qkv, angles, angles, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert "hopper_stream_kernel" in str(traced)
    assert traced.out_avals[0].shape == (9216, 32, 80)


@pytest.mark.skipif(not HAVE_MOSAIC, reason="the kernel is for JAX 0.11.2 and 0.12")
@pytest.mark.parametrize("fuse", ON_GPU.fuse)
@pytest.mark.parametrize("route", ON_GPU.routes)
def test_stress_calls_reach_what_they_mean(on, route, fuse):
    on("9.0")
    call = functools.partial(
        pallas_kernels.fused_rope_attention_qkvpacked,
        max_seqlen=route.max_seqlen, fuse=fuse, implementation="kernel",
    )  # fmt: skip
    inputs = draw_for(route, ON_GPU)
    arrays = inputs.qkv, inputs.cos, inputs.sin, inputs.cu_seqlens
    reached = in_jax(jax.jit(call).trace(*map(jnp.asarray, arrays)).jaxpr, interpreted=False)
    rotated = {"rotate"} if fuse != "qk" else set()
    serves = WARP_SPECIALIZED if route.name == "warp-specialized" else route.name
    # Which wants both rotated.
    serves = "stream" if serves == WARP_SPECIALIZED and fuse != "none" else serves
    assert reached == rotated | {serves}


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_MOSAIC, reason="the kernel is for JAX 0.11.2 and 0.12")
@pytest.mark.parametrize(
    ("last", "head_dim", "rotary_dim", "packed"),
    [(241, 80, 80, True), (242, 80, 80, False), (242, 72, 72, True), (241, 128, 64, False)],
)
def test_the_public_functions_launch_it(monkeypatch, last, head_dim, rotary_dim, packed):
    if jax.local_devices()[0].compute_capability != "9.0":
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setattr(choose, "_MULTIPROCESSORS", 1)  # waves are full
    name = "fused_rope_attention_qkvpacked" if packed else "fused_rope_attention"
    monkeypatch.setattr(choose, "_SHORTEST_COPIED", 1)
    case = make_case((1100, 3, last), head_dim=head_dim, rotary_dim=rotary_dim)
    arguments = [jnp.asarray(x) for x in (case.packed if packed else case.separate)]

    @jax.jit
    def call(*arguments):
        return getattr(pallas_kernels, name)(*arguments, max_seqlen=1100)

    assert "mosaic" in call.lower(*arguments).as_text()
    assert_accurate(np.asarray(call(*arguments)), case)
