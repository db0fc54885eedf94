"""The reference of the PyTorch package, which nothing checks but what it is itself."""

from tests.rounding_contract import RoundingContract
from tests.triton_kernels.adapter import to_torch
from triton_kernels import rope_attention_reference


class TestReference(RoundingContract):
    @staticmethod
    def attend(case, scale):
        tensors = map(to_torch, case.separate)
        return rope_attention_reference(*tensors, scale).float().cpu().numpy()
