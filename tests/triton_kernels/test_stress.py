"""Both implementations in PyTorch under stress; the kernel is interpreted on a CPU."""

import pytest

from compare.environment import has_gpu
from tests.kernel_contract import both_kernels
from tests.kernel_stress_contract import StressContract
from tests.triton_kernels.adapter import TorchAdapter


class TestKernel(TorchAdapter, StressContract):
    implementation = "triton"

    @both_kernels
    @pytest.mark.parametrize(
        "dtype",
        [
            "bfloat16",
            pytest.param(
                "float16",
                marks=pytest.mark.xfail(
                    has_gpu(),
                    strict=True,
                    reason="logits * scale_log2 - row_max is one multiply-add on a GPU: what it "
                    "leaves of the largest logit is the rounding of row_max, 25 at logits of 4e8, "
                    "and 2 ** 25 or 2 ** -25 are no numbers of fp16",
                ),
            ),
            "float32",
        ],
    )
    def test_q_and_k_near_the_largest_of_fp16(self, dtype, max_seqlen):
        super().test_q_and_k_near_the_largest_of_fp16(dtype, max_seqlen)


class TestReference(TorchAdapter, StressContract):
    implementation = "reference"
