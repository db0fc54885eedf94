"""Both implementations in PyTorch under stress; the kernel is interpreted on a CPU."""

from tests.kernel_stress_contract import BatchInvarianceContract, StressContract
from tests.triton_kernels.adapter import TorchAdapter


class TestKernel(TorchAdapter, StressContract, BatchInvarianceContract):
    implementation = "kernel"


class TestReference(TorchAdapter, StressContract):
    implementation = "reference"
