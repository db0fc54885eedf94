"""Gate and up behind a late norm in PyTorch: the contract, and what only PyTorch has."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from compare.torch_tower import gated_product as torch_gated_product  # noqa: E402
from compare.torch_tower.device import as_tensor, find_device  # noqa: E402
from compare.torch_tower.gated_product import gated_product, in_one_kernel  # noqa: E402
from flax_models.common.weights import Biases  # noqa: E402
from tests.gated_contract import DTYPES, EPS  # noqa: E402
from tests.gated_product_contract import GatedProductContract, draw  # noqa: E402
from triton_kernels.attend import INTERPRETED  # noqa: E402

DEVICE = find_device(None)


def put(residual, weight, biases):
    residual, weight, *biases = (as_tensor(x).to(DEVICE) for x in (residual, weight, *biases))
    return residual, weight, Biases(*biases)


def numbers(tensor):
    return tensor.float().cpu().numpy().astype(DTYPES[str(tensor.dtype).removeprefix("torch.")])


class TestGatedProduct(GatedProductContract):
    implementations = (
        ("reference", "auto", "kernel")
        if INTERPRETED or torch.cuda.is_available()
        else ("reference", "auto")
    )

    why_not_in_one = (
        None
        if "kernel" in implementations
        else "Triton's kernels run on a GPU, or where TRITON_INTERPRET=1"
    )
    has_one_kernel = True
    row_unit = 1

    @staticmethod
    def multiply(residual, weight, biases, eps, implementation):
        residual, weight, biases = put(residual, weight, biases)
        return numbers(gated_product(residual, weight, biases, eps, implementation))

    @staticmethod
    def multiply_in_one(residual, weight, biases, eps):
        return numbers(in_one_kernel(*put(residual, weight, biases), eps))

    @staticmethod
    def is_faster(monkeypatch, tokens, hidden, width, dtype, capability):
        found = tuple(map(int, capability.split(".")))
        monkeypatch.setattr(torch_gated_product, "_compute_capability", lambda index: found)
        residual = SimpleNamespace(
            shape=(tokens, hidden),
            dtype=getattr(torch, dtype),
            device=torch.device("cuda", 0),
            is_cuda=True,
        )
        return torch_gated_product._is_faster(residual, width)

    @staticmethod
    def has_gpu():
        return torch.cuda.is_available()


needs_kernel = pytest.mark.skipif(
    TestGatedProduct.why_not_in_one is not None, reason=str(TestGatedProduct.why_not_in_one)
)


@needs_kernel
@pytest.mark.parametrize(("faster", "way"), [(True, "in_one_kernel"), (False, "gated_activation")])
def test_what_is_faster_runs(monkeypatch, faster, way):
    monkeypatch.setattr(torch_gated_product, "_is_faster", lambda *_: faster)
    result = torch.ones(5, 8, dtype=torch.float16, device=DEVICE)
    monkeypatch.setattr(torch_gated_product, way, lambda *_: result)
    out = TestGatedProduct.multiply(*draw(5, 64, 8, "float16"), EPS, "kernel")
    assert (out == 1).all()


@needs_kernel
def test_any_strides_and_addresses():
    residual, weight, biases = put(*draw(135, 64, 192, "float16"))
    expected = in_one_kernel(residual, weight, biases, EPS)

    def transposed(x):
        return x.t().contiguous().t()

    def unaligned(x):
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    assert unaligned(residual).data_ptr() % 16
    for change in (transposed, unaligned):
        out = in_one_kernel(change(residual), change(weight), biases, EPS)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        out = gated_product(change(residual), change(weight), biases, EPS, "kernel")
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-3)


def test_the_operator_is_as_it_says():
    residual, weight, biases = draw(3, 16, 8)
    tensors = [torch.from_numpy(x).to(DEVICE) for x in (residual, weight, *biases)]
    torch.library.opcheck(torch.ops.late_norm.gated_product, (*tensors, EPS, "reference"))
