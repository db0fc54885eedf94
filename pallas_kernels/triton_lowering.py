"""The lowering of a pallas_call whose kernel the Triton package compiles and jaxlib launches.

It needs JAX's internals (how a pallas_call becomes Triton IR, jaxlib's launcher), which no other
file does: where a version of JAX has them elsewhere, importing this fails and XLA compiles.
"""

import functools
import tempfile
import warnings
import zlib
from collections.abc import Sequence
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

from pallas_kernels.compile import local_gpu

# Bytes; what Pallas tells the compiler of every pointer.
ALIGNMENT = 16


@dataclass(frozen=True)
class TritonParams(plgpu.CompilerParams):
    """Parameters of a kernel that the Triton package compiles.

    Attributes:
        maxnreg: upper bound on the registers of a thread; None: the compiler's choice.
        disable_licm: keep values within a loop around another that the compiler would compute
            once, before it: what `tl.range(disable_licm=True)` says in Triton.
    """

    maxnreg: int | None = None
    disable_licm: bool = False


def can_launch() -> bool:
    """Whether JAX's CUDA plugin, which brings the launcher, is installed."""
    return hasattr(gpu_triton, "TritonKernelCall")


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

    target = GPUTarget("cuda", capability, 32)
    options = {
        "num_warps": params.num_warps,
        "num_stages": params.num_stages,
        "maxnreg": params.maxnreg,
        "enable_fp_fusion": True,
    }
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "kernel.ttir")  # Triton takes IR from files alone
        file.write_text(ttir)
        file.write_text(_first_stage(file, target, options))
        return triton.compile(str(file), target=target, options=options)


def _first_stage(file: Path, target: Any, options: dict[str, Any]) -> str:
    """What Triton's first stage, which triton.compile skips for IR from a file, makes of the IR.

    Pallas' products accumulate onto zeros; this is where a sum that is added to one becomes its
    accumulator, so that tensor cores add it.
    """
    from triton._C.libtriton import ir as triton_ir
    from triton.compiler import IRSource, make_backend

    backend = make_backend(target)
    context = triton_ir.context()
    source = IRSource(str(file), context, backend)
    source.module.context = context
    stages: dict[str, Any] = {}
    backend.add_stages(stages, backend.parse_options(options), source.language)
    # Where the file lay is in the IR's locations: left there, no cache would know the kernel again.
    return str(stages["ttir"](source.module, {})).replace(str(file), file.name)


def _lower(
    context: Any, *operands: ir.Value, compiler_params: TritonParams, **call: Any
) -> Sequence[ir.Value]:
    """The lowering rule of a pallas_call with TritonParams."""
    try:
        name, launch = _kernel_call(context, compiler_params, call["jaxpr"], call["grid_mapping"])
    except Exception as error:  # whatever other versions of JAX or Triton raise
        message = f"Triton failed on a Pallas kernel, which XLA compiles instead: {error!r}"
        warnings.warn(message, stacklevel=2)
        shared = {f.name: getattr(compiler_params, f.name) for f in fields(plgpu.CompilerParams)}
        fallback = plgpu.CompilerParams(**shared)
        return pallas_call_lowering(context, *operands, compiler_params=fallback, **call)
    rule = jax.ffi.ffi_lowering(
        "triton_kernel_call_ffi",
        backend_config={
            "name": ir.StringAttr.get(name),
            "opaque": ir.StringAttr.get(zlib.compress(launch.to_proto(name, b""))),
        },
    )
    return rule(context, *operands)


def _kernel_call(
    context: Any, params: TritonParams, jaxpr: Any, grid_mapping: Any
) -> tuple[str, Any]:
    """The compiled kernel's name, and the gpu_triton.TritonKernelCall that launches it."""
    # Where no GPU is at hand, Pallas lowers for compute capability 9.0 too.
    capability = int(gpu.compute_capability.replace(".", "")) if (gpu := local_gpu()) else 90
    lowered = lowering.lower_jaxpr_to_triton_module(
        jaxpr, grid_mapping, "cuda", capability, mlir_ctx=context.module_context
    )
    if params.disable_licm:
        _disable_licm(lowered.module)
    ttir = lowered.module.operation.get_asm()
    compiled = compile_ir(ttir, params, capability)
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
    return compiled.metadata.name, launch


def _disable_licm(module: ir.Module) -> None:
    """Mark every loop around another as `TritonParams.disable_licm` says."""
    text = "#llvm.loop_annotation<licm = <disable = true, versioningDisable = true>>"

    def mark(operation: ir.Operation) -> ir.WalkResult:
        body = operation.regions[0].blocks[0].operations if operation.name == "scf.for" else ()
        if any(inner.operation.name == "scf.for" for inner in body):
            with operation.context:
                operation.attributes["llvm.loop_annotation"] = ir.Attribute.parse(text)
        return ir.WalkResult.ADVANCE

    module.operation.walk(mark)


pallas_core.register_lowering_rule(TritonParams, _lower, "gpu")
