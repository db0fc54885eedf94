"""The warp-specialized kernels for gradients: when they are taken and, on a GPU, the contract."""

import pytest
import torch

from tests.hopper_contract import HopperGradientContract
from tests.kernel_cases import make_case
from tests.kernel_gradient_contract import KernelGradientContract, weights_for
from tests.triton_kernels.adapter import to_torch
from tests.triton_kernels.stand_ins import A100, H100, H200, hopper
from tests.triton_kernels.test_gradients import TorchGradients, by_kernel
from triton_kernels.launching import backward, choose, fast_path, plan
from triton_kernels.launching.choose import has_specialized_gradients
from triton_kernels.launching.fast_path import form_of

SHAPE = {"dtype": torch.bfloat16, "head_dim": 80, "max_seqlen": 9216, "tokens": 9216, "heads": 16}
BY_TILES = ["hopper_backward_q_kernel", "hopper_backward_kv_kernel"]
BY_WARPS = ["stream_backward_q_kernel", "stream_backward_kv_kernel"]


def takes(gpu=H200, warp_specialized=True, **changes):
    return has_specialized_gradients(**SHAPE | changes, source=hopper(gpu, warp_specialized))


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"gpu": H100}, {"head_dim": 72}, {"head_dim": 128}, {"max_seqlen": 768},
        {"tokens": 1024, "max_seqlen": 1024},  # 128 programs of 132
        {"tokens": 2304, "max_seqlen": 2304},  # 288 of three waves' 396
    ],
)  # fmt: skip
def test_long_images_of_wide_heads_take_them(on_hopper, changes):
    assert takes(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": A100}, {"gpu": None}, {"warp_specialized": False},
        {"dtype": torch.float32}, {"dtype": torch.float16}, {"head_dim": 64}, {"head_dim": 136},
        {"max_seqlen": 767}, {"tokens": 1152, "max_seqlen": 1152},  # 144 of 264
    ],
)  # fmt: skip
def test_others_do_not(on_hopper, changes):
    assert not takes(**changes)


def test_one_line_turns_them_off(on_hopper, monkeypatch):
    monkeypatch.setattr(choose, "_BACKWARD_DTYPES", ())
    assert not takes()


def plan_for(v, grad, max_seqlen=9216):
    """What is launched for tensors of these forms."""
    angles, cu_seqlens = torch.empty(9216, 40), torch.empty(2, dtype=torch.int32)
    x = torch.empty(9216, 16, 80, dtype=torch.bfloat16)
    form = form_of((x, x, v, grad, angles, angles, cu_seqlens))
    return backward._stream_backward(form, hopper(), max_seqlen, 0.1)


@pytest.mark.parametrize("expanded", [None, "v", "grad"])
def test_heads_that_no_descriptor_has_are_left_to_the_stream_kernels(
    on_hopper, monkeypatch, expanded
):
    monkeypatch.setattr(plan, "binary_of", lambda *_: None)
    tensors = {name: torch.empty(9216, 16, 80, dtype=torch.bfloat16) for name in ("v", "grad")}
    if expanded:
        tensors[expanded] = tensors[expanded][:, :1].expand(-1, 16, -1)
    found = plan_for(**tensors)
    kernels = [call.kernel.__name__ for call in (found.queries, found.keys)]
    assert kernels == (BY_WARPS if expanded else BY_TILES)


def test_only_what_is_behind_the_rotation_starts_while_it_ends(on_hopper, monkeypatch):
    monkeypatch.setattr(plan, "binary_of", lambda *_: None)
    x = torch.empty(9216, 16, 80, dtype=torch.bfloat16)
    found = plan_for(x, x)
    assert [call.overlap for call in (found.queries, found.keys)] == [True, False]
    # Blocks of 128 queries, or keys, of 16 heads; tiles of 64 rows of the block or of the queries.
    assert [call.programs for call in (found.queries, found.keys)] == [72 * 16] * 2
    rows = [[tile.block[0] for tile in call.tiles[::2]] for call in (found.queries, found.keys)]
    assert rows == [[64, 128, 128, 64], [64] * 4]


class Forced(TorchGradients):
    """Every gradient that they are made for takes them, however small the call."""

    implementation = "kernel"

    @pytest.fixture(autouse=True)
    def forced(self, monkeypatch):
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a GPU of compute capability 9.0")

        def can_be(dtype, head_dim, *_):
            return dtype == torch.bfloat16 and 64 < head_dim <= 128

        monkeypatch.setattr(backward, "has_specialized_gradients", can_be)
        fast_path.plans.clear()
        yield
        fast_path.plans.clear()


@pytest.mark.gpu
class TestContract(Forced, KernelGradientContract):
    pass


@pytest.mark.gpu
class TestGradients(Forced, HopperGradientContract):
    def test_they_are_what_runs(self, monkeypatch):
        launched, launch = [], backward.launch_kernel
        monkeypatch.setattr(
            backward,
            "launch_kernel",
            lambda call, *rest: launched.append(call.kernel.__name__) or launch(call, *rest),
        )
        case = make_case((300,), head_dim=80)
        self.gradients(case, weights_for(case), angles=False, max_seqlen=1024)
        assert launched == BY_TILES

    def test_gradients_of_strided_tensors(self):
        """Also the result's: by tokens, and by heads that lie apart."""
        q, k, v, *rest = map(to_torch, make_case((300, 150), head_dim=80).separate)
        weights = torch.randn_like(q)
        expected = by_kernel(False, q, k, v, *rest, weights=weights, max_seqlen=1024)
        wide = torch.stack([q, k, v, weights], dim=2).flatten(2)  # [tokens, heads, 4 head_dim]
        *qkv, grad = wide.split(80, dim=2)
        found = by_kernel(False, *qkv, *rest, weights=grad, max_seqlen=1024)
        assert all(map(torch.equal, found, expected))
