"""Both implementations in PyTorch under stress; the kernel is interpreted on a CPU."""

import numpy as np
import pytest

from tests.interpreter import matmul_in_fp64
from tests.kernel_stress_contract import BatchInvarianceContract, StressContract
from tests.triton_kernels.adapter import TorchAdapter


@pytest.fixture(scope="module", autouse=True)
def sums_in_any_order():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(np, "matmul", matmul_in_fp64)
        yield


class TestKernel(TorchAdapter, StressContract, BatchInvarianceContract):
    implementation = "kernel"


class TestReference(TorchAdapter, StressContract):
    implementation = "reference"
