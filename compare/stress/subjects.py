"""The two kernels as the stress checks call them: the same inputs, the result as a tensor."""

import functools
from abc import ABC, abstractmethod
from typing import Any

import torch

from compare.implementations.kernels import our_attention, require_jax_gpu
from compare.stress.guards import guarded, guarded_results, intact, same_bits
from compare.workloads.arrays import KernelArguments, from_jax, jax_arguments, torch_arguments
from compare.workloads.kernels import KernelInputs


class MemoryFault(AssertionError):
    """A kernel wrote beside its tensors, or changed an input."""


class Subject(ABC):
    """A kernel under stress."""

    name: str

    @abstractmethod
    def put(self, inputs: KernelInputs) -> KernelArguments:
        """The inputs as arrays on the device."""

    @abstractmethod
    def attend(self, arguments: KernelArguments, max_seqlen: int, **options: Any) -> torch.Tensor:
        """One call: [tokens, heads, head_dim] as a tensor on torch_device().

        Args:
            arguments: as `put` returns them.
            max_seqlen: bound on a segment's length.
            options: `fuse` and `scale` of the public function.
        """

    def attend_guarded(
        self, arguments: KernelArguments, max_seqlen: int, **options: Any
    ) -> torch.Tensor:
        """The same with every tensor between guards, where the framework allows it.

        Raises:
            MemoryFault: something beside a tensor was written, or an input.
        """
        return self.attend(arguments, max_seqlen, **options)

    def run(self, inputs: KernelInputs, **options: Any) -> torch.Tensor:
        """One call on fresh arrays."""
        return self.attend(self.put(inputs), inputs.max_seqlen, **options)


class Triton(Subject):
    """The Triton kernel; interpreted where there is no GPU."""

    name = "triton"

    def put(self, inputs: KernelInputs) -> KernelArguments:
        return torch_arguments(inputs)

    def attend(self, arguments: KernelArguments, max_seqlen: int, **options: Any) -> torch.Tensor:
        return our_attention("triton_kernels", max_seqlen, **options)(*arguments)

    def attend_guarded(
        self, arguments: KernelArguments, max_seqlen: int, **options: Any
    ) -> torch.Tensor:
        *tensors, cu_seqlens = arguments
        surrounded = [guarded(x) for x in tensors]
        held = [buffer.clone() for _, buffer in surrounded]
        # Around cu_seqlens a legal value: reading it would move a segment, NaN there is none.
        segments, _ = guarded(cu_seqlens, value=len(arguments[0]) // 2)
        with guarded_results() as results:
            out = self.attend((*(x for x, _ in surrounded), segments), max_seqlen, **options)
        for before, (_, buffer) in zip(held, surrounded, strict=True):
            if not same_bits(before, buffer):
                raise MemoryFault("an input or the memory around it was written")
        if not all(map(intact, results)):
            raise MemoryFault("the memory around a result was written")
        return out


class Pallas(Subject):
    """The Pallas kernel; interpreted where there is no GPU. XLA places its arrays: no guards."""

    name = "pallas"

    def put(self, inputs: KernelInputs) -> KernelArguments:
        require_jax_gpu()
        return jax_arguments(inputs)

    def attend(self, arguments: KernelArguments, max_seqlen: int, **options: Any) -> torch.Tensor:
        return from_jax(_jitted(max_seqlen, tuple(sorted(options.items())))(*arguments))


@functools.lru_cache(maxsize=64)
def _jitted(max_seqlen: int, options: tuple[tuple[str, Any], ...]) -> Any:
    import jax

    return jax.jit(our_attention("pallas_kernels", max_seqlen, **dict(options)))


SUBJECTS = (Triton(), Pallas())
