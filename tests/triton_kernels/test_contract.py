"""Both implementations in PyTorch: the kernel compiled on a GPU, interpreted on a CPU."""

from tests.kernel_contract import KernelContract
from tests.launch_contract import LaunchContract
from tests.triton_kernels.adapter import TorchAdapter


class TestKernel(TorchAdapter, KernelContract, LaunchContract):
    implementation = "kernel"


class TestReference(TorchAdapter, KernelContract):
    implementation = "reference"
