"""Both implementations in Pallas under stress; the kernel is interpreted on a CPU."""

from tests.kernel_stress_contract import BatchInvarianceContract, StressContract
from tests.pallas_kernels.adapter import JaxAdapter


class TestKernel(JaxAdapter, StressContract, BatchInvarianceContract):
    implementation = "kernel"


class TestReference(JaxAdapter, StressContract):
    implementation = "reference"
