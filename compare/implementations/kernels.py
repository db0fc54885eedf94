"""The two kernels that the project is about, as agreement and timing call them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

from compare.common.environment import has_gpu
from compare.common.errors import UnavailableError
from compare.workloads.kernels import Embedding, KernelWorkload

# (qkv, cos, sin, cu_seqlens) of the implementation's framework -> [tokens, heads, head_dim]; with
# the result's gradient behind them -> the gradient in qkv, of its shape
KernelCall = Callable[..., Any]
FUSE = ("qk", "q", "none")
AUTO = "auto"
TABLES, INSIDE = "tables", "inside"  # where a sinusoidal embedding's angles come from
_MIB = 1 << 20


@dataclass(frozen=True)
class KernelImplementation:
    """A named way to compute the operation.

    Attributes:
        name: as in tables and result files.
        framework: whose arrays the call takes.
        prepare: makes the call for one workload; raises UnavailableError or ImportError with the
            reason where it cannot run here, and whatever a library raises where that fails.
        ours: held to the numerics rules; what is not ours is a peer, there to be timed.
    """

    name: str
    framework: Literal["torch", "jax"]
    prepare: Callable[[KernelWorkload], KernelCall]
    ours: bool = False


def triton(
    fuse: str = AUTO, batch_invariant: bool = False, tables: bool = True
) -> KernelImplementation:
    """The Triton kernel; interpreted where there is no GPU.

    Without tables it computes the angles from positions, which sinusoidal workloads alone have.
    """
    prepare = partial(_prepare_triton, fuse=fuse, batch_invariant=batch_invariant, tables=tables)
    name = "triton, batch-invariant" if batch_invariant else "triton"
    return KernelImplementation(name, "torch", prepare, ours=True)


def pallas(
    fuse: str = AUTO, batch_invariant: bool = False, tables: bool = True
) -> KernelImplementation:
    """The Pallas kernel; interpreted where there is no GPU. Tables as in `triton`."""
    prepare = partial(_prepare_pallas, fuse=fuse, batch_invariant=batch_invariant, tables=tables)
    name = "pallas, batch-invariant" if batch_invariant else "pallas"
    return KernelImplementation(name, "jax", prepare, ours=True)


def pallas_by_xla() -> KernelImplementation:
    """The Pallas kernel as XLA compiles it, which it does where Triton is not installed."""
    return KernelImplementation("pallas by XLA", "jax", _prepare_pallas_by_xla, ours=True)


def with_gradient(implementation: KernelImplementation) -> KernelImplementation:
    """The same, called and differentiated: (qkv, cos, sin, cu_seqlens, grad) -> gradient in qkv."""
    step = {"torch": _torch_step, "jax": jax_step}[implementation.framework]
    return replace(implementation, prepare=lambda workload: step(implementation.prepare(workload)))


def _torch_step(attend: KernelCall) -> KernelCall:
    import torch

    def step(qkv: Any, cos: Any, sin: Any, cu_seqlens: Any, grad: Any) -> Any:
        qkv = qkv.detach().requires_grad_()
        return torch.autograd.grad(attend(qkv, cos, sin, cu_seqlens), qkv, grad)[0]

    return step


def jax_step(attend: KernelCall) -> KernelCall:
    """A call in JAX and its backward pass: -> the gradient in qkv.

    Its `lower` is that of the whole program, as a jitted function's.
    """
    import jax

    @jax.jit
    def both(qkv: Any, cos: Any, sin: Any, cu_seqlens: Any, grad: Any) -> Any:
        out, pull = jax.vjp(lambda x: attend(x, cos, sin, cu_seqlens), qkv)
        return out, pull(grad)[0]

    def step(*arguments: Any) -> Any:
        # What is not returned XLA leaves out: a window's gradient needs nothing of its forward
        # pass.
        return both(*arguments)[1]

    step.lower = both.lower
    return step


def program_memory_mib(jitted: Any, *arguments: Any) -> tuple[float, float]:
    """What a compiled program takes on the device: MiB of its arguments, and beside them.

    Beside them are results and temporaries, without results that take a donated argument's place.
    XLA plans all of it when it compiles. JAX's own count of memory in use is no measure of a call:
    its peak never falls, and other calls' results are in it.

    Args:
        jitted: what `jax.jit` returned, or anything else with its `lower`; that it has been called
            with such arguments before saves it from being compiled here.
        arguments: arrays, or anything that has a shape and a dtype.
    """
    sizes = jitted.lower(*arguments).compile().memory_analysis()
    new = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes / _MIB, (new + sizes.temp_size_in_bytes) / _MIB


def require_jax_gpu() -> None:
    """Make sure that JAX runs where PyTorch does.

    Raises:
        UnavailableError: there is a GPU and JAX does not use it.
    """
    import jax

    if has_gpu() and jax.default_backend() != "gpu":
        raise UnavailableError(
            f"JAX runs on {jax.default_backend()}, not on the GPU: install jax with CUDA"
        )


def our_attention(
    package: str, max_seqlen: int, embedding: Embedding = "rope", **options: Any
) -> KernelCall:
    """The kernel of a package, "triton_kernels" or "pallas_kernels", with its options bound.

    Args:
        package: imported here.
        max_seqlen: bound on a segment's length.
        embedding: which of the package's functions it is.
        options: further ones of the public function.
    """
    attend = getattr(import_module(package), f"fused_{embedding}_attention_qkvpacked")
    return partial(attend, max_seqlen=max_seqlen, implementation="kernel", **options)


def _prepare_triton(workload: KernelWorkload, tables: bool = True, **options: Any) -> KernelCall:
    attend = our_attention("triton_kernels", workload.longest, workload.embedding, **options)
    if tables:
        return attend
    from compare.workloads.arrays import to_torch

    positions = to_torch(workload.positions)
    return lambda qkv, cos, sin, cu_seqlens: _by_positions(attend, qkv, cu_seqlens, positions)


def _prepare_pallas(workload: KernelWorkload, tables: bool = True, **options: Any) -> KernelCall:
    import jax

    require_jax_gpu()
    attend = our_attention("pallas_kernels", workload.longest, workload.embedding, **options)
    if tables:
        return jax.jit(attend)
    positions = jax.numpy.array(workload.positions)
    # An argument: XLA would compute what follows from a constant once and for all.
    attend = jax.jit(partial(_by_positions, attend))
    return lambda qkv, cos, sin, cu_seqlens: attend(qkv, cu_seqlens, positions)


def _by_positions(attend: KernelCall, qkv: Any, cu_seqlens: Any, positions: Any) -> Any:
    return attend(qkv, None, None, cu_seqlens, positions=positions)


def _prepare_pallas_by_xla(workload: KernelWorkload) -> KernelCall:
    import jax

    from pallas_kernels.launching.compile import compiler, compiling_by

    if compiler() == "xla":
        raise UnavailableError("XLA compiles every Pallas kernel here")
    attend = _prepare_pallas(workload)

    def traced(*arguments: Any) -> Any:
        with compiling_by("xla"):
            return attend(*arguments)

    return jax.jit(traced)
