"""Both implementations in PyTorch: the kernel compiled on a GPU, interpreted on a CPU."""

from tests.embedding_contract import EmbeddingContract
from tests.kernel_contract import KernelContract
from tests.launch_contract import LaunchContract
from tests.triton_kernels.adapter import TorchAdapter


class TestKernel(TorchAdapter, KernelContract, EmbeddingContract, LaunchContract):
    implementation = "kernel"


class TestReference(TorchAdapter, KernelContract, EmbeddingContract):
    implementation = "reference"
