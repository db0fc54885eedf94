"""Gate and up behind a late norm in PyTorch: the contract, and what only PyTorch has."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from compare import torch_gated_product  # noqa: E402
from compare.torch_device import as_tensor, find_device  # noqa: E402
from compare.torch_gated import Biases  # noqa: E402
from compare.torch_gated_product import gated_product, in_one_kernel  # noqa: E402
from tests.gated_contract import DTYPES, EPS  # noqa: E402
from tests.gated_product_contract import GatedProductContract, draw  # noqa: E402
from triton_kernels.attention import INTERPRETED, runs_kernel  # noqa: E402

DEVICE = find_device(None)


class TestGatedProduct(GatedProductContract):
    implementations = (
        ("reference", "auto", "triton")
        if INTERPRETED or torch.cuda.is_available()
        else ("reference", "auto")
    )

    @staticmethod
    def multiply(stream, weight, biases, eps, implementation, one_kernel):
        stream, weight, *biases = (as_tensor(x).to(DEVICE) for x in (stream, weight, *biases))
        biases = Biases(*biases)
        if one_kernel and runs_kernel(DEVICE, implementation):
            out = in_one_kernel(stream, weight, biases, eps)
        else:
            out = gated_product(stream, weight, biases, eps, implementation)
        return out.float().cpu().numpy().astype(DTYPES[str(out.dtype).removeprefix("torch.")])

    @staticmethod
    def is_faster(monkeypatch, tokens, hidden, dtype, capability):
        found = tuple(map(int, capability.split(".")))
        monkeypatch.setattr(torch_gated_product, "_compute_capability", lambda index: found)
        stream = SimpleNamespace(
            shape=(tokens, hidden),
            dtype=getattr(torch, dtype),
            device=torch.device("cuda", 0),
            is_cuda=True,
        )
        return torch_gated_product._is_faster(stream)

    @staticmethod
    def has_gpu():
        return torch.cuda.is_available()


@pytest.mark.skipif("triton" not in TestGatedProduct.implementations, reason="no kernel runs here")
@pytest.mark.parametrize(("faster", "way"), [(True, "in_one_kernel"), (False, "gated_activation")])
def test_what_is_faster_runs(monkeypatch, faster, way):
    monkeypatch.setattr(torch_gated_product, "_is_faster", lambda stream: faster)
    result = torch.ones(5, 8, dtype=torch.float16, device=DEVICE)
    monkeypatch.setattr(torch_gated_product, way, lambda *_: result)
    stream, weight, biases = draw(5, 64, 8, "float16")
    out = TestGatedProduct.multiply(stream, weight, biases, EPS, "triton", one_kernel=False)
    assert (out == 1).all()


@pytest.mark.skipif("triton" not in TestGatedProduct.implementations, reason="no kernel runs here")
@pytest.mark.parametrize("one_kernel", [True, False])
def test_any_strides(one_kernel):
    stream, weight, biases = draw(5, 64, 8, "float16")
    stream, weight, *biases = (as_tensor(x).to(DEVICE) for x in (stream, weight, *biases))
    results = []
    for x, w in ((stream, weight), (stream.t().contiguous().t(), weight.t().contiguous().t())):
        if one_kernel:
            results.append(in_one_kernel(x, w, Biases(*biases), EPS))
        else:
            results.append(gated_product(x, w, Biases(*biases), EPS, "triton"))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)


def test_the_operator_is_as_it_says():
    stream, weight, biases = draw(3, 16, 8)
    tensors = [torch.from_numpy(x).to(DEVICE) for x in (stream, weight, *biases)]
    torch.library.opcheck(torch.ops.late_norm.gated_product, (*tensors, EPS, "reference"))
