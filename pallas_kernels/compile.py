"""Who compiles a kernel: the Triton package where it can, else XLA.

Pallas turns a kernel into Triton IR and leaves the rest to XLA, which compiles it with a copy of
Triton of its own. Two things are lost that way: a bound on registers, and the L1 cache, since XLA
has the driver give nearly all of it up for shared memory (cuFuncSetCacheConfig). A window kernel
waits for loads that need L1 to land in and takes 1.6 times as long.

The Triton package compiles the same IR, and jaxlib launches what it makes: the custom call that
`jax_triton` uses too. This is the one file that knows JAX's internals.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
from jax._src.lib import gpu_triton
from jax._src.lib.mlir import ir
from jax._src.pallas import core as pallas_core
from jax._src.pallas.triton import lowering
from jax._src.pallas.triton.pallas_call_registration import pallas_call_lowering
from jax.experimental.pallas import triton as plgpu

# Bytes; what Pallas tells the compiler of every pointer.
ALIGNMENT = 16
COMPILERS = ("triton", "xla")
_chosen: ContextVar[str | None] = ContextVar("compiler", default=None)


@dataclass(frozen=True)
class TritonParams(plgpu.CompilerParams):
    """Parameters of a kernel that the Triton package compiles.

    Attributes:
        maxnreg: upper bound on the registers of a thread; None: the compiler's choice.
    """

    maxnreg: int | None = None


def compiler() -> str:
    """Who compiles the kernels of a call that is traced now, "triton" or "xla".

    The Triton package where it is installed along with JAX's CUDA plugin, else XLA.
    """
    return _chosen.get() or _default_compiler()


@contextlib.contextmanager
def compiling_by(name: str) -> Iterator[None]:
    """Within the context, kernels that this thread traces are compiled by one of COMPILERS."""
    if name not in COMPILERS:
        raise ValueError(f"the compiler must be one of {COMPILERS}, got {name!r}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


@functools.cache
def _default_compiler() -> str:
    launchable = hasattr(gpu_triton, "TritonKernelCall")
    return "triton" if launchable and importlib.util.find_spec("triton") else "xla"


def compiler_params(num_warps: int, num_stages: int, maxnreg: int | None) -> plgpu.CompilerParams:
    """What a pallas_call needs for compiler() to compile it; XLA knows no bound on registers."""
    if compiler() == "xla":
        return plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    return TritonParams(num_warps, num_stages, maxnreg)


@functools.cache
def local_gpu() -> jax.Device | None:
    """The first GPU here; None where there is none, though one may be lowered for."""
    try:
        return jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None


@functools.lru_cache(maxsize=256)
def compile_ir(ttir: str, params: TritonParams, capability: int) -> Any:
    """Have the Triton package compile a kernel's IR.

    Args:
        ttir: what Pallas made of the kernel.
        params: how to compile it.
        capability: the GPU's compute capability, as in 90 for 9.0.

    Returns:
        A triton.compiler.CompiledKernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "kernel.ttir")  # Triton takes IR from files alone
        file.write_text(ttir)
        return triton.compile(
            str(file),
            target=GPUTarget("cuda", capability, 32),
            options={
                "num_warps": params.num_warps,
                "num_stages": params.num_stages,
                "maxnreg": params.maxnreg,
                "enable_fp_fusion": True,
            },
        )


def _lower(
    context: Any, *operands: ir.Value, compiler_params: TritonParams, **call: Any
) -> Sequence[ir.Value]:
    """The lowering rule of a pallas_call with TritonParams."""
    # Where no GPU is at hand, Pallas lowers for compute capability 9.0 too.
    capability = int(gpu.compute_capability.replace(".", "")) if (gpu := local_gpu()) else 90
    lowered = lowering.lower_jaxpr_to_triton_module(
        call["jaxpr"], call["grid_mapping"], "cuda", capability, mlir_ctx=context.module_context
    )
    ttir = lowered.module.operation.get_asm()
    try:
        compiled = compile_ir(ttir, compiler_params, capability)
    except Exception as error:  # whatever a version that reads the IR otherwise may raise
        version = importlib.metadata.version("triton")
        message = f"Triton {version} failed on a Pallas kernel, which XLA compiles instead: {error}"
        warnings.warn(message, stacklevel=2)
        shared = {f.name: getattr(compiler_params, f.name) for f in fields(plgpu.CompilerParams)}
        fallback = plgpu.CompilerParams(**shared)
        return pallas_call_lowering(context, *operands, compiler_params=fallback, **call)

    kernel = gpu_triton.TritonKernel(
        compiled.metadata.name,
        compiled.metadata.num_warps,
        compiled.metadata.num_ctas,
        compiled.metadata.shared,
        compiled.asm["ptx"],
        ttir,
        capability,
    )
    pointers = len(context.avals_in) + len(context.avals_out)
    launch = gpu_triton.TritonKernelCall(
        kernel,
        *(*lowered.grid, 1, 1)[:3],
        [gpu_triton.create_array_parameter(0, ALIGNMENT)] * pointers,
    )
    name = compiled.metadata.name
    rule = jax.ffi.ffi_lowering(
        "triton_kernel_call_ffi",
        backend_config={
            "name": ir.StringAttr.get(name),
            "opaque": ir.StringAttr.get(zlib.compress(launch.to_proto(name, b""))),
        },
    )
    return rule(context, *operands)


pallas_core.register_lowering_rule(TritonParams, _lower, "gpu")
