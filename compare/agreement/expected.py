"""What a workload's results are judged by: the oracle's answer and the unfused error."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compare.agreement.metrics import kernel_verdict, relative_rms_error
from compare.agreement.oracle import oracle, rotated, rotated_once, unfused
from compare.common.result_files import Verdict
from compare.workloads.arrays import KernelArguments, jax_arguments, torch_arguments
from compare.workloads.kernels import KernelInputs, KernelWorkload


@dataclass(frozen=True)
class Expected:
    """One workload with the answer that is expected of it.

    Attributes:
        inputs: what every implementation gets.
        exact: fp64, the oracle's answer, [tokens, heads, head_dim] for attention.
        unfused_error: relative RMS error of the unfused computation in the workload's dtype.
    """

    workload: KernelWorkload
    inputs: KernelInputs
    exact: torch.Tensor
    unfused_error: float

    @classmethod
    def of(cls, workload: KernelWorkload, inputs: KernelInputs | None = None) -> "Expected":
        """Draw inputs, unless they are given, and compute what is right."""
        inputs = workload.inputs() if inputs is None else inputs
        exact = oracle(inputs)
        return cls(workload, inputs, exact, relative_rms_error(unfused(inputs), exact))

    @classmethod
    def of_rotation(cls, workload: KernelWorkload, inputs: KernelInputs) -> "Expected":
        """The same of the rotation alone, whose result is [tokens, 2, heads, head_dim]."""
        exact = rotated(inputs)
        return cls(workload, inputs, exact, relative_rms_error(rotated_once(inputs), exact))

    @functools.cached_property
    def torch_arguments(self) -> KernelArguments:
        """The inputs as tensors, carried to the device once; whoever rotates in place copies."""
        return torch_arguments(self.inputs)

    @functools.cached_property
    def jax_arguments(self) -> KernelArguments:
        """The inputs as JAX arrays, carried to the device once."""
        return jax_arguments(self.inputs)

    def judge(self, outputs: Sequence[torch.Tensor]) -> Verdict:
        """Rule 1 on the worst of some outputs, each of the shape of `exact`."""
        errors = [relative_rms_error(output, self.exact) for output in outputs]
        # max() alone would drop a NaN that does not come first.
        worst = max(errors) if all(error == error for error in errors) else float("nan")
        return kernel_verdict(worst, self.unfused_error, self.workload.dtype)
