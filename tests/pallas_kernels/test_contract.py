"""Both implementations in Pallas: the kernel compiled on a GPU, interpreted on a CPU."""

from tests.embedding_contract import EmbeddingContract
from tests.kernel_contract import KernelContract
from tests.launch_contract import LaunchContract
from tests.pallas_kernels.adapter import JaxAdapter


class TestKernel(JaxAdapter, KernelContract, EmbeddingContract, LaunchContract):
    implementation = "kernel"


class TestReference(JaxAdapter, KernelContract, EmbeddingContract):
    implementation = "reference"
