"""The two kernels as the stress checks call them: the same inputs, the result as a tensor."""

import functools
from abc import ABC, abstractmethod
from typing import Any

import torch

from compare.implementations.kernels import our_attention, require_jax_gpu
from compare.stress.guards import guarded, guarded_results, intact, same_bits
from compare.stress.launched import in_jax, noting_triton
from compare.workloads.arrays import KernelArguments, from_jax, jax_arguments, torch_arguments
from compare.workloads.kernels import KernelInputs


class MemoryFault(AssertionError):
    """A kernel wrote beside its tensors, or changed an input."""


class Subject(ABC):
    """A kernel under stress.

    Attributes:
        name: as in result files.
        launched: the kernels that its last call launched, see `launched`.
        row_unit: how far places have to be apart for a segment to have the same bits in the
            warp-specialized kernel, a multiple of so many rows; in others it always has.
    """

    name: str
    launched: frozenset[str] = frozenset()
    row_unit: int = 1

    @abstractmethod
    def put(self, inputs: KernelInputs) -> KernelArguments:
        """The inputs as arrays on the device."""

    @abstractmethod
    def attend(
        self, arguments: KernelArguments, max_seqlen: int, grad: Any = None, **options: Any
    ) -> torch.Tensor:
        """One call: [tokens, heads, head_dim] as a tensor on torch_device(); notes its kernels.

        Args:
            arguments: as `put` returns them.
            max_seqlen: bound on a segment's length.
            grad: the result's gradient, an array of the subject's: then that in qkv is returned,
                of its shape.
            options: `fuse`, `scale` and `batch_invariant` of the public function.
        """

    def attend_guarded(
        self, arguments: KernelArguments, max_seqlen: int, **options: Any
    ) -> torch.Tensor:
        """The same with every tensor between guards, where the framework allows it.

        Raises:
            MemoryFault: something beside a tensor was written, or an input.
        """
        return self.attend(arguments, max_seqlen, **options)


class Triton(Subject):
    """The Triton kernel; interpreted where there is no GPU."""

    name = "triton"

    def put(self, inputs: KernelInputs) -> KernelArguments:
        return torch_arguments(inputs)

    def attend(
        self, arguments: KernelArguments, max_seqlen: int, grad: Any = None, **options: Any
    ) -> torch.Tensor:
        qkv, *rest = arguments
        qkv = qkv.detach().requires_grad_(grad is not None)
        with noting_triton() as launched:
            out = our_attention("triton_kernels", max_seqlen, **options)(qkv, *rest)
            if grad is not None:
                [out] = torch.autograd.grad(out, qkv, grad)
        self.launched = frozenset(launched)
        return out

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

    @property
    def row_unit(self) -> int:
        """Its copies start at such rows."""
        from pallas_kernels.launching.choose import ROW_UNIT

        return ROW_UNIT

    def put(self, inputs: KernelInputs) -> KernelArguments:
        require_jax_gpu()
        return jax_arguments(inputs)

    def attend(
        self, arguments: KernelArguments, max_seqlen: int, grad: Any = None, **options: Any
    ) -> torch.Tensor:
        call = max_seqlen, tuple(sorted(options.items())), grad is not None
        arguments = arguments if grad is None else (*arguments, grad)
        out = from_jax(_jitted(*call)(*arguments))
        self.launched = _kernels(*call, *((x.shape, x.dtype) for x in arguments))
        return out


@functools.lru_cache(maxsize=64)
def _jitted(max_seqlen: int, options: tuple[tuple[str, Any], ...], gradient: bool) -> Any:
    import jax

    attend = our_attention("pallas_kernels", max_seqlen, **dict(options))

    def pulled(qkv: Any, cos: Any, sin: Any, cu_seqlens: Any, grad: Any) -> Any:
        _, pull = jax.vjp(lambda qkv: attend(qkv, cos, sin, cu_seqlens), qkv)
        return pull(grad)[0]

    return jax.jit(pulled if gradient else attend)


@functools.lru_cache(maxsize=256)
def _kernels(
    max_seqlen: int,
    options: tuple[tuple[str, Any], ...],
    gradient: bool,
    *forms: tuple[tuple[int, ...], Any],
) -> frozenset[str]:
    """Those in the program for arguments of some shapes and dtypes: all of it is run."""
    import jax

    shapes = [jax.ShapeDtypeStruct(*form) for form in forms]
    program = _jitted(max_seqlen, options, gradient).trace(*shapes).jaxpr
    return in_jax(program, interpreted=jax.default_backend() == "cpu")


SUBJECTS = (Triton(), Pallas())
