"""The warp-specialized kernel: when it is taken and, on its GPU, the whole contract."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import triton_kernels
from tests.hopper_contract import HopperContract
from tests.kernel_cases import make_case
from tests.kernel_contract import KernelContract
from tests.kernel_stress_contract import StressContract
from tests.triton_kernels.adapter import TorchAdapter, assert_log_sum_exps
from tests.triton_kernels.stand_ins import A100, H100, H200, hopper
from triton_kernels.launching import choose, fast_path, plan
from triton_kernels.launching.choose import (
    auto_fuse,
    is_warp_specialized,
    launch_source,
    launching_by,
)
from triton_kernels.launching.descriptors import can_describe
from triton_kernels.launching.fast_path import form_of
from triton_kernels.launching.plan import make_plan

SHAPE = {"dtype": torch.bfloat16, "head_dim": 80, "max_seqlen": 9216, "tokens": 9216, "heads": 16}


def takes(gpu=H200, warp_specialized=True, **changes):
    return is_warp_specialized(**SHAPE | changes, source=hopper(gpu, warp_specialized))


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"gpu": H100}, {"dtype": torch.float16}, {"head_dim": 72}, {"head_dim": 128},
        {"max_seqlen": 768}, {"max_seqlen": 768, "head_dim": 128},  # in many segments
        {"tokens": 1936, "max_seqlen": 1936},  # 256 programs, of two waves' 264
        {"tokens": 3136, "max_seqlen": 3136},  # 400 programs, of four waves' 528
        {"tokens": 2304, "max_seqlen": 2304, "head_dim": 128},  # 288 programs, of three waves' 396
        {"tokens": 2304, "max_seqlen": 2304, "head_dim": 72},
    ],
)  # fmt: skip
def test_long_images_of_wide_heads_take_it(on_hopper, changes):
    assert takes(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": A100}, {"gpu": None}, {"warp_specialized": False},
        {"dtype": torch.float32}, {"head_dim": 64}, {"head_dim": 136},
        {"max_seqlen": 767}, {"max_seqlen": 767, "head_dim": 128},
        {"tokens": 2304, "max_seqlen": 2304},
        {"tokens": 2304, "max_seqlen": 2304, "head_dim": 112},
        {"tokens": 2112, "max_seqlen": 2112, "head_dim": 128},  # 272 of 396
    ],
)  # fmt: skip
def test_others_do_not(on_hopper, changes):
    assert not takes(**changes)


@pytest.mark.parametrize(("gpu", "fuse"), [(H200, "none"), (A100, "q")])
def test_q_is_rotated_beforehand_for_it_however_little_rotates(on_hopper, gpu, fuse):
    assert auto_fuse(rotary_dim=40, **SHAPE, source=hopper(gpu)) == fuse


@pytest.mark.parametrize("longest", [np.int64(9216), np.int32(9216)], ids=repr)
def test_a_bound_of_numpy_s_is_launched_as_a_number(on_hopper, monkeypatch, longest):
    """And so is a number after it, whose plan is the same."""
    launched = []
    monkeypatch.setattr(plan, "launch_kernel", lambda call, *_: launched.append(call))
    monkeypatch.setattr("triton_kernels.attend.launch_source", lambda _: hopper())
    monkeypatch.setattr("triton_kernels.attend.INTERPRETED", True)
    # In its key the kernel would look for functions that it calls, which are interpreted here.
    monkeypatch.setattr(plan, "binary_of", lambda *_: None)
    fast_path.plans.clear()
    angles = torch.empty(9216, 40)
    cu_seqlens = torch.tensor([0, 9216], dtype=torch.int32)
    qkv = torch.empty(9216, 3, 16, 80, dtype=torch.bfloat16)
    for bound in (longest, 9216):
        triton_kernels.fused_rope_attention_qkvpacked(
            qkv, angles, angles, cu_seqlens, max_seqlen=bound, implementation="kernel"
        )
    fast_path.plans.clear()
    attentions = [call for call in launched if call.kernel is choose.hopper_stream_kernel]
    assert len(attentions) == 2
    assert {type(x) for call in attentions for x in call.numbers} == {int, float}


@pytest.mark.parametrize(
    ("gpu", "tokens", "max_seqlen", "overlap"),
    [(H100, 1024, 1024, True), (H100, 9216, 9216, True), (H100, 1024, 512, False),
     (A100, 1024, 1024, False)],
)  # fmt: skip
def test_it_starts_while_the_rotation_ends(
    on_hopper, monkeypatch, gpu, tokens, max_seqlen, overlap
):
    monkeypatch.setattr(plan, "binary_of", lambda *_: None)
    angles, cu_seqlens = torch.empty(tokens, 40), torch.empty(2, dtype=torch.int32)
    qkv = torch.empty(tokens, 3, 16, 80, dtype=torch.bfloat16)
    form = form_of((qkv, angles, angles, cu_seqlens))
    found = make_plan(form, True, True, hopper(gpu), max_seqlen, 0.1, "none")
    [rotation], attending = found.rotations, found.attention
    assert attending.overlap == overlap
    assert not rotation.call.overlap  # what is in front of it is not known
    assert (attending.kernel is choose.hopper_stream_kernel) == overlap
    # On such GPUs the rotation is compiled to let the next kernel start; others do not know how.
    assert rotation.call.constants[-1] is (gpu is H100)


@pytest.mark.parametrize("expanded", [False, True])
def test_heads_that_no_descriptor_has_are_left_to_the_stream_kernel(
    on_hopper, monkeypatch, expanded
):
    monkeypatch.setattr(plan, "binary_of", lambda *_: None)
    angles, cu_seqlens = torch.empty(1024, 40), torch.empty(2, dtype=torch.int32)
    q, k, v = torch.empty(3, 1024, 16, 80, dtype=torch.bfloat16)
    v = v[:, :1].expand(-1, 16, -1) if expanded else v
    form = form_of((q, k, v, angles, angles, cu_seqlens))
    found = make_plan(form, True, False, hopper(), 1024, 0.1, "none").attention
    assert (found.kernel is choose.hopper_stream_kernel) == (not expanded)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_batch_invariant_calls_go_without_it(on_hopper, monkeypatch, batch_invariant):
    """Whether it is taken follows from how much is in a call."""
    monkeypatch.setattr(plan, "binary_of", lambda *_: None)
    angles, cu_seqlens = torch.empty(9216, 40), torch.empty(2, dtype=torch.int32)
    form = form_of((torch.empty(9216, 3, 16, 80).bfloat16(), angles, angles, cu_seqlens))
    found = make_plan(form, True, True, hopper(), 9216, 0.1, "none", batch_invariant).attention
    assert (found.kernel is choose.hopper_stream_kernel) == (not batch_invariant)


def test_where_it_cannot_run_none_do(monkeypatch):
    monkeypatch.setattr(choose, "_CAN_RUN", False)
    assert not takes()


def test_without_gluon_the_stream_kernel_is_launched():
    """As where a version of Triton has it elsewhere; a process of its own, as it is imported."""
    code = (
        "import sys; sys.modules['triton.experimental.gluon'] = None\n"
        "import triton_kernels\n"
        "from triton_kernels.launching import choose\n"
        "assert choose.hopper_stream_kernel is None and not choose._CAN_RUN\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def test_launches_of_a_table_may_be_without_it(on_hopper):
    sources = []
    for allowed in (True, False):
        with launching_by(launch_source(None).table, warp_specialized=allowed):
            sources.append(launch_source(None))
    sources.append(launch_source(None))
    assert [source.warp_specialized for source in sources] == [True, False, True]


@pytest.mark.parametrize(
    ("strides", "can"),
    [((3840, 80), True), ((80, 2**30), True), ((3840, 0), False), ((2**39, 80), False)],
)
def test_which_strides_descriptors_have(strides, can):
    assert can_describe(strides) == can


class Forced(TorchAdapter):
    """Every call that is rotated beforehand takes the warp-specialized kernel, however small."""

    implementation = "kernel"

    @pytest.fixture(autouse=True)
    def forced(self, monkeypatch):
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a GPU of compute capability 9.0")

        def can_be(dtype, head_dim, *_):
            return dtype != torch.float32 and head_dim <= 128

        monkeypatch.setattr(plan, "is_warp_specialized", can_be)
        fast_path.plans.clear()
        yield
        fast_path.plans.clear()


@pytest.mark.gpu
class TestStress(Forced, StressContract):
    pass


@pytest.mark.gpu
class TestLengths(Forced, HopperContract):
    pass


@pytest.mark.gpu
class TestContract(Forced, KernelContract):
    def test_it_is_what_runs(self, monkeypatch):
        launched = []
        run = plan.make_call
        monkeypatch.setattr(
            plan, "make_call", lambda kernel, *rest: launched.append(kernel) or run(kernel, *rest)
        )
        fast_path.plans.clear()
        self.attention(make_case((300,), head_dim=80), max_seqlen=1024, fuse="none")
        assert choose.hopper_stream_kernel in launched

    @pytest.mark.parametrize(("head_dim", "dtype"), [(80, "bfloat16"), (128, "float16")])
    def test_log_sum_exps(self, head_dim, dtype):
        """Also of rows that their reference does not fit, which are computed again."""
        lengths = (700, 1, 0, 129, 513, 64, 1024, 5)
        case = make_case(lengths, head_dim=head_dim, dtype=dtype, leading=37, trailing=211)
        case.qkv[300:500, 1] *= 20
        assert_log_sum_exps(case, max_seqlen=1024, fuse="none")
