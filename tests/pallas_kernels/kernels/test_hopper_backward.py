"""The warp-specialized kernels for gradients: when they are taken; on their GPU the contract, of
which the interpreter does a part; and lowered for CUDA.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as mosaic
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import pallas_kernels
from compare.stress.launched import WARP_SPECIALIZED_BACKWARD, in_jax
from pallas_kernels.launching import backward, choose
from pallas_kernels.launching.compile import HAVE_MOSAIC
from pallas_kernels.launching.hopper_backward import hopper_gradients
from pallas_kernels.launching.table import Table
from tests.hopper_contract import HopperGradientContract
from tests.kernel_cases import assert_accurate_gradients, make_case, relative_rms
from tests.kernel_gradient_contract import KernelGradientContract, weights_for
from tests.pallas_kernels.adapter import ON_CPU
from tests.pallas_kernels.kernels.test_hopper_stream import matmul_in_fp64
from tests.pallas_kernels.no_gpu import cuda_device
from tests.pallas_kernels.test_gradients import JaxGradients, differentiated

needs_mosaic = pytest.mark.skipif(not HAVE_MOSAIC, reason="they are for JAX 0.11.2 and 0.12")
SHAPE = {"dtype": jnp.bfloat16, "head_dim": 80, "max_seqlen": 9216, "tokens": 9216, "heads": 16}


@pytest.fixture
def on(monkeypatch):
    """Make this a machine with a GPU of a compute capability, and JAX one that has Mosaic."""

    def put(capability):
        gpus = (SimpleNamespace(compute_capability=capability),)
        monkeypatch.setattr(choose, "local_gpus", lambda: gpus)
        monkeypatch.setattr(choose, "HAVE_MOSAIC", True)

    return put


def takes(**changes):
    return choose.has_specialized_gradients(**SHAPE | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"head_dim": 72}, {"head_dim": 72, "heads": 15}, {"head_dim": 128},
        {"max_seqlen": 768}, {"tokens": 9220},  # not by eights
        {"tokens": 1024, "max_seqlen": 1024},  # 128 programs of 132
        {"tokens": 2304, "max_seqlen": 2304},  # 288 of three waves' 396
    ],
)  # fmt: skip
def test_long_images_of_wide_heads_take_them(on, changes):
    on("9.0")
    assert takes(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": jnp.float32}, {"dtype": jnp.float16}, {"head_dim": 64}, {"head_dim": 136},
        {"max_seqlen": 767}, {"tokens": 1152, "max_seqlen": 1152},  # 144 of 264
        {"tokens": 120, "heads": 132},  # which hold no tile
    ],
)  # fmt: skip
def test_others_do_not(on, changes):
    on("9.0")
    assert not takes(**changes)


def test_nor_do_other_gpus_and_one_line_turns_them_off(on, monkeypatch):
    on("10.0")
    assert not takes()
    on("9.0")
    with choose.launching_by(Table.read(choose.TABLE_FILE), warp_specialized=False):
        assert not takes()
    monkeypatch.setattr(choose, "_BACKWARD_DTYPES", ())
    assert not takes()


@needs_mosaic
def test_public_gradients_launch_them_under_shard_map_too(on):
    on("9.0")
    heads, everywhere = PartitionSpec(None, None, "x"), PartitionSpec()
    attend = functools.partial(
        pallas_kernels.fused_rope_attention_qkvpacked, max_seqlen=9216, implementation="kernel"
    )
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(
        attend, mesh=mesh,
        in_specs=(heads, everywhere, everywhere, everywhere), out_specs=PartitionSpec(None, "x"),
    )  # fmt: skip
    angles = jax.ShapeDtypeStruct((9216, 40), jnp.float32)
    qkv = jax.ShapeDtypeStruct((9216, 3, 32, 80), jnp.bfloat16)
    cu_seqlens = jax.ShapeDtypeStruct((2,), jnp.int32)
    for call in (attend, split):
        gradient = jax.grad(lambda *x, call=call: call(*x).astype(jnp.float32).sum())
        traced = jax.make_jaxpr(gradient)(qkv, angles, angles, cu_seqlens)
        assert in_jax(traced, interpreted=False) >= {*WARP_SPECIALIZED_BACKWARD, "rotate_back"}
        assert traced.out_avals[0].shape == qkv.shape


@pytest.fixture(scope="module")
def forced():
    """Every gradient that they are made for takes them, however small the call."""
    if not ON_CPU and jax.local_devices()[0].compute_capability != "9.0":
        pytest.skip("needs a GPU of compute capability 9.0, or none")
    with pytest.MonkeyPatch.context() as monkeypatch:
        force(monkeypatch)
        yield
    forget()


@pytest.mark.usefixtures("forced")
class Forced(JaxGradients):
    implementation = "kernel"


def force(monkeypatch):
    stream = backward._stream_gradients

    def gradients(grad, *rest, **options):
        tokens, _, _, head_dim = grad.shape
        can_be = grad.dtype == jnp.bfloat16 and 64 < head_dim <= 128 and tokens >= choose.BLOCK
        return (hopper_gradients if can_be else stream)(grad, *rest, **options)

    monkeypatch.setattr(backward, "_stream_gradients", gradients)
    if ON_CPU:  # see interpret in test_hopper_stream.py
        monkeypatch.setattr(np, "matmul", matmul_in_fp64)
    forget()


def forget():
    """What was traced for others."""
    differentiated.cache_clear()
    jax.clear_caches()


@needs_mosaic
@pytest.mark.gpu
class TestContract(Forced, KernelGradientContract):
    pass


@needs_mosaic
@pytest.mark.gpu
class TestGradients(Forced, HopperGradientContract):
    pass


@needs_mosaic
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy's, of NaN
@pytest.mark.skipif(not ON_CPU, reason="the classes above run all of it")
class TestInTheInterpreter(Forced):
    def test_gradients(self, monkeypatch):
        """Of segments that meet within a group of warps, whole and masked tiles, an empty one, one
        of a token, and padding. NaN in one segment reaches no other. Loads, products and stores are
        ordered by the barriers alone.
        """
        from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

        params = functools.partial(mosaic.InterpretGPUParams, detect_races=True)
        monkeypatch.setattr(mosaic, "InterpretGPUParams", params)
        forget()
        case = make_case((130, 1, 0, 20, 42), head_dim=80, heads=1, leading=3, trailing=6)
        weights = weights_for(case)
        weights[case.padding] = np.nan
        options = {"packed": True, "angles": False, "max_seqlen": 1024}
        [found] = self.gradients(case, weights, **options)
        assert (found[case.padding] == 0).all()
        assert_accurate_gradients(np.moveaxis(found, 1, 0), case, weights)
        assert not interpret_pallas_call.get_races().races_found
        broken = slice(*case.segments[3])
        weights[broken] = np.inf
        case.qkv[broken] = np.nan
        [again] = self.gradients(case, weights, **options)
        assert np.isnan(again[broken].astype(np.float32)).any()
        for segment in (slice(broken.start), slice(broken.stop, None)):
            # Rows of the forward pass beside what is no number may round otherwise.
            assert relative_rms(again[segment], found[segment]) < 1e-2


def lowered(tokens, heads, head_dim, packed=True):
    """A call's gradients, as text and as a jaxpr."""
    x, qkv = (
        jax.ShapeDtypeStruct((tokens, parts, heads, head_dim), jnp.bfloat16) for parts in (1, 3)
    )
    angles = jax.ShapeDtypeStruct((tokens, head_dim // 2), jnp.float32)
    lse = jax.ShapeDtypeStruct((heads, tokens), jnp.float32)
    cu_seqlens = jax.ShapeDtypeStruct((5,), jnp.int32)
    call = functools.partial(hopper_gradients, max_seqlen=tokens, scale=0.1, interpret=False)
    with cuda_device():
        traced = jax.jit(call).trace(
            x, (qkv,) if packed else (x, x, x), angles, angles, cu_seqlens, x, lse
        )
        return traced.lower(lowering_platforms=("cuda",)).as_text(), traced.jaxpr


@needs_mosaic
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("tokens", "head_dim", "packed"),
    [(1024, 72, True), (9213, 96, False), (1024, 128, True)],
)
def test_what_fits_lowers_for_a_gpu(tokens, head_dim, packed):
    module, program = lowered(tokens, 15, head_dim, packed)
    assert module.count("@mosaic_gpu_v2") == 2
    others = {"rotate", "rotate_back"}
    assert in_jax(program, interpreted=False) == {*WARP_SPECIALIZED_BACKWARD, *others}
    if head_dim % 16 == 0 and tokens % 128 == 0:  # all is read and written in place
        for copy in ("slice", "gather", "transpose", "concatenate", "convert", "pad", "copy"):
            assert f"stablehlo.{copy}" not in module
