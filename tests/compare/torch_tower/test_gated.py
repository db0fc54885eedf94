"""The gated activation behind a late norm in PyTorch: the contract, and sums in place."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from compare.torch_tower.device import as_tensor, find_device  # noqa: E402
from compare.torch_tower.gated import add_product, gated_activation  # noqa: E402
from flax_models.common.weights import Biases  # noqa: E402
from tests.gated_contract import DTYPES, GatedContract  # noqa: E402
from triton_kernels.attend import INTERPRETED  # noqa: E402

DEVICE = find_device(None)


class TestGatedActivation(GatedContract):
    implementations = (
        ("reference", "auto", "kernel")
        if INTERPRETED or torch.cuda.is_available()
        else ("reference", "auto")
    )

    @staticmethod
    def activate(product, residual, biases, eps, implementation):
        product, residual, *biases = (as_tensor(x).to(DEVICE) for x in (product, residual, *biases))
        out = gated_activation(product, residual, Biases(*biases), eps, implementation)
        return out.float().cpu().numpy().astype(DTYPES[str(out.dtype).removeprefix("torch.")])

    @staticmethod
    def has_gpu():
        return torch.cuda.is_available()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_is_added_in_place(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 24), (5, 40), (24, 40)
    residual, x, weight = (
        torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes
    )
    exact = residual.double() + x.double() @ weight.double().t()
    address = residual.data_ptr()
    assert add_product(residual, x, weight) is None
    assert residual.data_ptr() == address
    bound = torch.finfo(dtype).eps * exact.abs().max()
    assert (residual.double() - exact).abs().max() <= 2 * bound


def test_compiled_code_calls_the_operator():
    """Which writes in place; what is exported has none of it."""
    found = []

    def collect(graph, _):
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    arguments = [torch.ones(shape, device=DEVICE) for shape in ((3, 16), (3, 24), (16, 24))]
    torch.compile(lambda *x: add_product(*x), backend=collect)(*arguments)
    assert [name for name in found if "add_product" in name]


def test_the_operator_is_as_it_says():
    residual, x, weight = (
        torch.ones(shape, device=DEVICE) for shape in ((3, 16), (3, 24), (16, 24))
    )
    torch.library.opcheck(torch.ops.late_norm.add_product, (residual, x, weight))
