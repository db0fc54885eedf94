"""A residual sum and its LayerNorm: against fp64, in place, and where somebody hooks the norm."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from compare.torch_tower.device import find_device  # noqa: E402
from compare.torch_tower.summed_norm import sum_and_norm  # noqa: E402
from tests.hostile import examples  # noqa: E402
from triton_kernels.attend import INTERPRETED  # noqa: E402

DEVICE = find_device(None)
HAS_KERNEL = INTERPRETED or torch.cuda.is_available()
IMPLEMENTATIONS = ("reference", "auto", *(["kernel"] if HAS_KERNEL else []))
TOLERANCES = {torch.bfloat16: 2.5e-3, torch.float16: 3.5e-4, torch.float32: 1e-6}  # one rounding


def draw(tokens, hidden, dtype=torch.float32, seed=0):
    """A residual stream with a mean, a branch, and a norm with weights of its own."""
    generator = torch.Generator().manual_seed(seed)
    residual, branch = (3 * torch.randn(tokens, hidden, generator=generator) for _ in range(2))
    norm = nn.LayerNorm(hidden, eps=1e-6)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(hidden, generator=generator))
    put = {"device": DEVICE, "dtype": dtype}
    return (residual + 2).to(**put), branch.to(**put), norm.to(**put)


def oracle(residual, branch, norm):
    """The same in fp64, of the very numbers."""
    x = residual.double() + branch.double()
    centred = x - x.mean(dim=1, keepdim=True)
    scale = (centred.square().mean(dim=1, keepdim=True) + norm.eps).rsqrt()
    return x, centred * scale * norm.weight.double() + norm.bias.double()


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("tokens", "hidden"), [(3, 1152), (5, 1280), (2, 24)])
def test_both_are_the_oracles_rounded_once(name, dtype, tokens, hidden):
    residual, branch, norm = draw(tokens, hidden, dtype)
    exact = oracle(residual, branch, norm)
    address = residual.data_ptr()
    found = sum_and_norm(residual, branch, norm, name)
    assert found[0].data_ptr() == address
    for ours, wanted in zip(found, exact, strict=True):
        assert (ours.dtype, ours.shape) == (dtype, wanted.shape)
        assert relative_error(ours, wanted) < TOLERANCES[dtype]


@settings(max_examples=examples(10))
@given(st.integers(1, 4), st.integers(2, 300), st.integers(0, 99))
def test_any_widths(tokens, hidden, seed):
    for name in IMPLEMENTATIONS:
        arguments = draw(tokens, hidden, seed=seed)
        exact = oracle(*arguments)
        for ours, wanted in zip(sum_and_norm(*arguments, name), exact, strict=True):
            torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rows_do_not_see_each_other(name):
    residual, branch, norm = draw(6, 96)
    changed = residual.clone()
    changed[3] = torch.nan
    before, after = (sum_and_norm(x, branch, norm, name) for x in (residual, changed))
    kept = torch.arange(6) != 3
    for ours, theirs in zip(before, after, strict=True):
        assert torch.equal(ours[kept], theirs[kept])
        assert theirs[3].isnan().all()


@pytest.mark.parametrize(
    "norm", [nn.Identity(), nn.RMSNorm(24), nn.LayerNorm(24, bias=False), nn.LayerNorm((3, 24))]
)
def test_another_norm_is_called(norm):
    residual, branch, _ = draw(3, 24)
    norm = norm.to(DEVICE)
    summed = residual + branch
    found = sum_and_norm(residual, branch, norm, "auto")
    assert torch.equal(found[0], summed)
    assert torch.equal(found[1], norm(summed))


def test_a_norm_that_is_hooked_is_called():
    residual, branch, norm = draw(3, 24)
    called = []
    norm.register_forward_hook(lambda *_: called.append(1))
    sum_and_norm(residual, branch, norm, "auto")
    assert called == [1]


def test_the_operator_is_as_it_says():
    residual, branch, norm = draw(3, 24)
    arguments = residual, branch, norm.weight.detach(), norm.bias.detach(), norm.eps, "auto"
    torch.library.opcheck(torch.ops.residual_stream.add_and_norm, arguments)


@pytest.mark.gpu
def test_offsets_beyond_31_bits():
    rows = draw(64, 1152, torch.bfloat16)
    residual, branch = (
        torch.zeros(1_900_000, 1152, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
    )
    residual[-64:], branch[-64:] = rows[:2]
    exact = oracle(*rows)
    found = sum_and_norm(residual, branch, rows[2], "kernel")
    for ours, wanted in zip(found, exact, strict=True):
        assert relative_error(ours[-64:], wanted) < TOLERANCES[torch.bfloat16]
