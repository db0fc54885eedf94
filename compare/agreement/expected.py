"""What a workload's results are judged by: the oracle's answer and the unfused error."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from compare.agreement.metrics import (
    kernel_verdict,
    max_abs_error,
    relative_rms_error,
    unfused_verdict,
)
from compare.agreement.oracle import (
    oracle,
    oracle_gradient,
    rotated,
    rotated_once,
    unfused,
    unfused_gradient,
)
from compare.common.result_files import Verdict
from compare.workloads.arrays import KernelArguments, jax_arguments, torch_arguments
from compare.workloads.kernels import ABSOLUTE_LIMITS, KernelInputs, KernelWorkload


@dataclass(frozen=True)
class Expected:
    """One workload with the answer that is expected of it.

    Attributes:
        inputs: what every implementation gets.
        exact: fp64, the oracle's answer, [tokens, heads, head_dim] for attention, and
            [tokens, 3, heads, head_dim] for its gradient.
        unfused_error: relative RMS error of the unfused computation in the workload's dtype; of
            gradients those in q, k and v. Infinite, it excuses from that part of the rule.
        absolute_limit: of the error of any element; it is taken where there is a limit.
    """

    workload: KernelWorkload
    inputs: KernelInputs
    exact: torch.Tensor
    unfused_error: float | tuple[float, ...]
    absolute_limit: float = math.inf

    @classmethod
    def of(cls, workload: KernelWorkload, inputs: KernelInputs | None = None) -> "Expected":
        """Draw inputs, unless they are given, and compute what is right."""
        inputs = workload.inputs() if inputs is None else inputs
        if workload.gradients:
            exact = oracle_gradient(inputs)
            return cls(workload, inputs, exact, _errors_of_parts(unfused_gradient(inputs), exact))
        exact = oracle(inputs)
        unfused_error = relative_rms_error(unfused(inputs), exact)
        limit = ABSOLUTE_LIMITS.get(workload.dtype, math.inf)
        return cls(workload, inputs, exact, unfused_error, limit)

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
        """Rule 1 on the worst of some outputs, each of the shape of `exact`, or of their parts."""
        verdicts = [verdict for output in outputs for verdict in self._verdicts(output)]
        # max() alone would drop a NaN that does not come first.
        return max(verdicts, key=lambda v: (not v.passed, v.error != v.error, v.error - v.limit))

    def _verdicts(self, output: torch.Tensor) -> list[Verdict]:
        if isinstance(self.unfused_error, tuple):
            errors = _errors_of_parts(output, self.exact)
            return list(map(unfused_verdict, errors, self.unfused_error))
        error = relative_rms_error(output, self.exact)
        if self.workload.embedding == "rope":
            verdict = kernel_verdict(error, self.unfused_error, self.workload.dtype)
        else:
            verdict = unfused_verdict(error, self.unfused_error)
        if self.absolute_limit == math.inf:
            return [verdict]
        largest = max_abs_error(output, self.exact)
        return [replace(verdict, absolute_error=largest, absolute_limit=self.absolute_limit)]


def _errors_of_parts(gradient: torch.Tensor, exact: torch.Tensor) -> tuple[float, ...]:
    """Relative RMS errors of the gradients in q, k and v, which are of different sizes."""
    return tuple(map(relative_rms_error, gradient.unbind(1), exact.unbind(1)))
