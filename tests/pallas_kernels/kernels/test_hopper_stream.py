"""The warp-specialized kernel: on its GPU the whole contract, of which the interpreter does a part;
what its tiles make special; and lowered for CUDA.
"""

import dataclasses
import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as mosaic

from compare.stress.launched import WARP_SPECIALIZED, in_jax
from pallas_kernels import attention
from pallas_kernels.launching import choose, launch, plan
from pallas_kernels.launching.choose import ROW_UNIT, rotated_row, rows_of, tiles_fit
from pallas_kernels.launching.compile import HAVE_MOSAIC
from tests.hopper_contract import HopperContract
from tests.interpreter import matmul_in_fp64
from tests.kernel_cases import assert_accurate, assert_same_bits, make_case
from tests.kernel_contract import CUTS, STREAM, KernelContract
from tests.kernel_stress_contract import StressContract, late_logits
from tests.pallas_kernels.adapter import ON_CPU, JaxAdapter, assert_log_sum_exps, jitted
from tests.pallas_kernels.launching.test_lowering import cuda_device

pytestmark = [
    pytest.mark.skipif(not HAVE_MOSAIC, reason="the kernel is for JAX 0.11.2 and 0.12"),
    # From NumPy, by which the interpreter computes what overflows or is no number.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]


def takes(dtype, head_dim, max_seqlen, tokens, heads):
    return dtype != jnp.float32 and tiles_fit(tokens, heads, head_dim)


def interpret(monkeypatch):
    """Have what `takes` names interpreted, behind XLA's rotation."""
    attend, rotate = plan.attend, plan.rotate_by_xla

    def attend_forced(qkv, *rest, fuse, interpret, **options):
        tokens, _, heads, head_dim = (v := qkv[-1]).shape  # V's tiles are what has to fit
        forced = fuse == "none" and takes(v.dtype, head_dim, None, tokens, heads)
        return attend(qkv, *rest, fuse=fuse, interpret=interpret and not forced, **options)

    def rotate_and_spoil(x, *arguments, **options):
        """Rows of no token hold NaN: the rotation's kernel leaves them as they are."""
        return rotate(x, *arguments, **options).at[x.shape[0] :].set(jnp.nan)

    monkeypatch.setattr(attention, "attend", attend_forced)
    monkeypatch.setattr(plan, "HAVE_TRITON", False)
    monkeypatch.setattr(plan, "rotate_by_xla", rotate_and_spoil)
    run = functools.partial(launch.run_hopper_stream, interpret=True)
    monkeypatch.setattr(plan, "run_hopper_stream", run)
    monkeypatch.setattr(np, "matmul", matmul_in_fp64)


@pytest.fixture(scope="module", autouse=True)
def forced():
    """Every call that fits takes it, however small."""
    if not ON_CPU and jax.local_devices()[0].compute_capability != "9.0":
        pytest.skip("needs a GPU of compute capability 9.0, or none")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (choose, plan):
            monkeypatch.setattr(module, "is_warp_specialized", takes)
        if ON_CPU:
            interpret(monkeypatch)
        jax.clear_caches()
        yield
    jax.clear_caches()


def widened(case):
    """The case as the last rows, and the first columns, of one that the kernel's tiles fit."""
    tokens, _, heads, head_dim = case.qkv.shape
    rows = max(0, -(-(choose.BLOCK - tokens) // ROW_UNIT) * ROW_UNIT)
    widths = range(max(72, head_dim), 129, 8)
    width = next((x for x in widths if tiles_fit(tokens + rows, heads, x)), head_dim)
    cu_seqlens = case.cu_seqlens.astype(np.int64)
    moved = np.where(cu_seqlens >= 0, np.minimum(cu_seqlens + rows, 2**31 - 1), cu_seqlens)
    angles = ((rows, 0), (0, 0))
    if case.norms:  # whose mean is over all columns
        width = head_dim
    return dataclasses.replace(
        case,
        qkv=np.pad(case.qkv, ((rows, 0), (0, 0), (0, 0), (0, width - head_dim))),
        cos=np.pad(case.cos, angles),
        sin=np.pad(case.sin, angles),
        cu_seqlens=moved.astype(np.int32),
    )


class Forced(JaxAdapter):
    implementation = "kernel"
    row_unit = ROW_UNIT  # its copies start at such rows

    def attention(self, case, **options):
        tokens, _, _, head_dim = case.qkv.shape
        if tokens == 0 or case.qkv.dtype == np.float32:  # which it does not take
            return super().attention(case, **options)
        out = super().attention(widened(case), **{"scale": head_dim**-0.5} | options)
        return np.ascontiguousarray(out[-tokens:, :, :head_dim])


@pytest.mark.gpu
class TestLengths(Forced, HopperContract):
    pass


@pytest.mark.gpu
class TestContract(Forced, KernelContract):
    pass


@pytest.mark.gpu
class TestStress(Forced, StressContract):
    pass


class Contracts(Forced, KernelContract, StressContract):
    pass


attend = Forced().attention
LONG = {"max_seqlen": STREAM}


# Of the contract what shows most in little time.
@pytest.mark.skipif(not ON_CPU, reason="the classes above run all of it")
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("every_head_dim", [{"head_dim": head_dim} for head_dim in (72, 96, 128)]),
        ("every_dtype", [{"dtype": "float16", "head_dim": 80, "fuse": "none", "packed": False}]),
        ("every_fusion_packed_equals_separate", [{"fuse": "none", "head_dim": 80}]),
        ("grouped_queries_and_norms", [
            {"fuse": "none", "head_dim": 72, "rotary_dim": None, "dtype": "bfloat16", "heads": 4,
             "group": 2, "norms": "qk"},
        ]),
        ("segments_of_every_kind", [{"cu_seqlens": values} for values in CUTS.values()]),
        ("rows_of_a_longer_segment_are_right_or_nan", [
            {"max_seqlen": 9, "dtype": "float16", "atol": 4e-3, "further": {}}
        ]),
        ("a_broken_segment_breaks_no_other", [{"value": x} for x in (np.nan, np.inf, -np.inf)]),
        ("any_cu_seqlens_is_safe", [{"dtype": "bfloat16"}]),
        ("extreme_numbers_are_as_accurate_as_unfused", [{"dtype": "bfloat16"}]),
        ("q_and_k_near_the_largest_of_fp16", [{"dtype": "float16"}]),
        ("later_logits_far_above_the_first", [
            {"dtype": dtype, "above": above}
            for dtype, above in (("float16", 14), ("bfloat16", 60), ("float16", 1e4))
        ]),
        ("largest_values_beside_equal_late_logits", [{"head_dim": 24}]),
        ("large_values_beside_late_logits", [{"dtype": "bfloat16", "column": -1}]),
        ("same_inputs_same_bits", [{"dtype": "bfloat16"}]),
        ("a_segment_gives_the_same_bits_wherever_it_stands", [{}]),
        ("a_long_segment_gives_the_same_bits_wherever_it_stands", [{"late": True}]),
    ],
)  # fmt: skip
def test_the_contract_in_the_interpreter(name, cases):
    test = getattr(Contracts(), f"test_{name}")
    takes = inspect.signature(test).parameters
    for arguments in cases:
        test(**{k: v for k, v in (LONG | arguments).items() if k in takes})


def test_it_is_what_runs():
    arguments = [jnp.asarray(x) for x in widened(make_case((300,), head_dim=80)).packed]
    options = ("implementation", "kernel"), ("max_seqlen", STREAM)
    program = jitted(True, options, False).trace(*arguments).jaxpr
    assert WARP_SPECIALIZED in in_jax(program, interpreted=ON_CPU)


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(263, 2, 72), (196, 1, 80)])
def test_tokens_not_by_eights(tokens, heads, head_dim):
    """Their rows end within eights, with and without tokens of no segment there."""
    for trailing in (0, 1):
        lengths = 67, tokens - 67 - trailing
        case = make_case(lengths, heads=heads, head_dim=head_dim, trailing=trailing)
        case.qkv[70, 0] *= 4000  # a misfit
        assert_accurate(attend(case, fuse="none", **LONG), case)


def test_a_broken_head_breaks_none_whose_columns_its_tile_has():
    case = make_case((136,), heads=4, head_dim=72)
    case.qkv[:, 2, 1::2] = np.nan
    whole = dataclasses.replace(case, qkv=np.ascontiguousarray(case.qkv[:, :, ::2]))
    out = attend(case, fuse="none", **LONG)
    assert_accurate(np.ascontiguousarray(out[:, ::2]), whole)
    assert np.isnan(out[:, 1::2]).all()


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 72), (1, 80)])
def test_log_sum_exps(heads, head_dim):
    """Also of rows that their reference does not fit, which are computed again."""
    case = make_case((67, 0, 150), heads=heads, head_dim=head_dim, leading=3, trailing=5)
    case.qkv[180:200, 1] *= 30
    assert_log_sum_exps(case, fuse="none", **LONG)


@pytest.fixture
def anew():
    """What is compiled for a test is for it alone."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("head_dim", [80, 128])
def test_four_warps_load_what_one_does(monkeypatch, anew, head_dim):
    """As they do for arrays that vary over a mesh."""
    monkeypatch.setattr(plan, "HAVE_TRITON", False)  # whose launch would say that they vary
    case = make_case((64, 197), head_dim=head_dim, heads=1, leading=3)
    case.qkv[100, 0] *= 4000
    expected = attend(case, fuse="none", **LONG)
    monkeypatch.setattr(launch, "varying_axes", lambda *_: {"x"})
    jax.clear_caches()
    assert_same_bits(attend(case, fuse="none", **LONG), expected)


@pytest.mark.skipif(not ON_CPU, reason="nothing is interpreted")
def test_groups_of_warps_do_not_race(monkeypatch, anew):
    """Loads, products and stores, as the interpreter orders them by the barriers alone."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    params = mosaic.InterpretGPUParams
    monkeypatch.setattr(mosaic, "InterpretGPUParams", functools.partial(params, detect_races=True))
    case = make_case((180, 70), heads=1, leading=3, trailing=3)
    case = late_logits(case, 200, slice(60, 183))  # misfits in three groups of four
    assert_accurate(attend(case, fuse="none", **LONG), case)
    assert not interpret_pallas_call.get_races().races_found


@functools.partial(jax.jit, static_argnums=(3, 4))
def run(q_k, v, cu_seqlens, parts, keeps_lse):
    q, k = q_k if isinstance(q_k, tuple) else (q_k, q_k)
    return launch.run_hopper_stream(q, k, v, cu_seqlens, v.shape[2], parts, 0.1, 128, keeps_lse)


def lower(tokens, heads, head_dim, dtype="bfloat16", packed=True, keeps_lse=False):
    rows, part = rotated_row(heads, head_dim), 2 if packed else 1
    q_k = jax.ShapeDtypeStruct((rows_of(tokens), part, rows), dtype)
    v = jax.ShapeDtypeStruct((tokens, 3 if packed else 1, heads, head_dim), dtype)
    cu_seqlens = jax.ShapeDtypeStruct((5,), jnp.int32)
    with cuda_device():
        parts = (0, 1, 2) if packed else (0, 0, 0)
        traced = run.trace(q_k if packed else (q_k, q_k), v, cu_seqlens, parts, keeps_lse)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("tokens", "head_dim"),
    [
        *zip(itertools.cycle((128, 9213, 9213, 128)), range(72, 129, 8), strict=False),
        *((136, 80), (9216, 80)),
    ],
)
def test_what_fits_lowers_for_a_gpu(tokens, head_dim):
    heads = 15 if head_dim % 16 == 0 else 14
    assert tiles_fit(tokens, heads, head_dim)
    module = lower(tokens, heads, head_dim, keeps_lse=(tokens < 9000) == (head_dim % 16 == 0))
    assert module.count("@mosaic_gpu_v2") == 1


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
