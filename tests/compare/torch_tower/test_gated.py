"""The gated activation behind a late norm in PyTorch: the contract, and sums in place."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from compare.torch_tower.device import as_tensor, find_device  # noqa: E402
from compare.torch_tower.gated import Biases, add_product, gated_activation  # noqa: E402
from tests.gated_contract import DTYPES, GatedContract  # noqa: E402
from triton_kernels.attention import INTERPRETED  # noqa: E402

DEVICE = find_device(None)


class TestGatedActivation(GatedContract):
    implementations = (
        ("reference", "auto", "triton")
        if INTERPRETED or torch.cuda.is_available()
        else ("reference", "auto")
    )

    @staticmethod
    def activate(product, stream, biases, eps, implementation):
        product, stream, *biases = (as_tensor(x).to(DEVICE) for x in (product, stream, *biases))
        out = gated_activation(product, stream, Biases(*biases), eps, implementation)
        return out.float().cpu().numpy().astype(DTYPES[str(out.dtype).removeprefix("torch.")])

    @staticmethod
    def has_gpu():
        return torch.cuda.is_available()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_is_added_in_place(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 24), (5, 40), (24, 40)
    stream, x, weight = (
        torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes
    )
    exact = stream.double() + x.double() @ weight.double().t()
    address = stream.data_ptr()
    assert add_product(stream, x, weight) is None
    assert stream.data_ptr() == address
    bound = torch.finfo(dtype).eps * exact.abs().max()
    assert (stream.double() - exact).abs().max() <= 2 * bound


def test_the_operator_is_as_it_says():
    stream, x, weight = (torch.ones(shape, device=DEVICE) for shape in ((3, 16), (3, 24), (16, 24)))
    torch.library.opcheck(torch.ops.late_norm.add_product, (stream, x, weight))
