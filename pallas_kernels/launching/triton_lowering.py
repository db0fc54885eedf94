"""The lowering of a pallas_call whose kernel the Triton package compiles and XLA launches.

It needs JAX's internals (how a pallas_call becomes Triton IR), which no other file does: where a
version of JAX has them elsewhere, importing this fails and XLA compiles.
"""

import functools
import re
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
from jax._src.lib.mlir import ir
from jax._src.pallas import core as pallas_core
from jax._src.pallas.triton import lowering
from jax._src.pallas.triton.pallas_call_registration import pallas_call_lowering
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.launching.devices import local_gpu

# Bytes of shared memory that PTX may declare; more has to be asked for at the launch.
DECLARED_SHARED_MEMORY = 48 * 1024
# The GPU's driver assembles the PTX, and may be older than Triton's own assembler: for each compute
# capability a version known to every driver that knows the capability.
PTX_VERSIONS = {
    **dict.fromkeys((80, 86, 87, 89, 90), 80),
    **{100: 87, 103: 88, 110: 90, 120: 87, 121: 88},
}


@dataclass(frozen=True)
class TritonParams(plgpu.CompilerParams):
    """Parameters of a kernel that the Triton package compiles."""

    maxnreg: int | None = None  # upper bound on the registers of a thread, or the compiler's choice
    # Keep values within a loop around another that the compiler would compute once, before it: what
    # `tl.range(disable_licm=True)` says in Triton.
    disable_licm: bool = False


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, and how it is launched."""

    name: str  # of its entry point
    ptx: str
    grid: tuple[int, int, int]  # of programs
    threads: int  # of a program
    shared_memory: int  # bytes a program that the launch has to ask for
    pointers: int  # how many it takes


@functools.lru_cache(maxsize=256)
def compile_ir(ttir: str, params: TritonParams, capability: int) -> Any:
    """Have the Triton package compile what Pallas made of a kernel: a CompiledKernel of Triton's.

    capability: the GPU's compute capability, as in 90 for 9.0.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", capability, 32)
    options = {
        "num_warps": params.num_warps,
        "num_stages": params.num_stages,
        "maxnreg": params.maxnreg,
        "enable_fp_fusion": True,
        "ptx_version": PTX_VERSIONS.get(capability),
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
    # The IR's locations name the file: with its directory, no cache would recognise the kernel.
    return str(stages["ttir"](source.module, {})).replace(str(file), file.name)


def _lower(
    context: Any, *operands: ir.Value, compiler_params: TritonParams, **call: Any
) -> Sequence[ir.Value]:
    """The lowering rule of a pallas_call with TritonParams."""
    try:
        kernel = _kernel(context, compiler_params, call["jaxpr"], call["grid_mapping"])
    except Exception as error:  # whatever other versions of JAX or Triton raise
        message = f"Triton failed on a Pallas kernel, which XLA compiles instead: {error!r}"
        warnings.warn(message, stacklevel=2)
        shared = {f.name: getattr(compiler_params, f.name) for f in fields(plgpu.CompilerParams)}
        fallback = plgpu.CompilerParams(**shared)
        return pallas_call_lowering(context, *operands, compiler_params=fallback, **call)
    # The last pointers are to scratch memory, of which these kernels have none.
    inputs, outputs = len(context.avals_in), len(context.avals_out)
    scratch = kernel.pointers - inputs - outputs
    context = context.replace(avals_in=[*context.avals_in, *context.avals_in[:1] * scratch])
    attributes = _launch_attributes(kernel, range(inputs, inputs + outputs))
    aliases = dict(call["input_output_aliases"])
    rule = jax.ffi.ffi_lowering(
        "__gpu$xla.gpu.ptx", backend_config=attributes, operand_output_aliases=aliases
    )
    return rule(context, *operands, *operands[:1] * scratch)


def _kernel(context: Any, params: TritonParams, jaxpr: Any, grid_mapping: Any) -> Kernel:
    # Where no GPU is at hand, Pallas lowers for compute capability 9.0 too.
    capability = int(gpu.compute_capability.replace(".", "")) if (gpu := local_gpu()) else 90
    lowered = lowering.lower_jaxpr_to_triton_module(
        jaxpr, grid_mapping, "cuda", capability, mlir_ctx=context.module_context
    )
    if params.disable_licm:
        _disable_licm(lowered.module)
    compiled = compile_ir(lowered.module.operation.get_asm(), params, capability)
    if compiled.metadata.global_scratch_size:
        raise NotImplementedError("scratch memory")
    ptx, shared_memory = compiled.asm["ptx"], compiled.metadata.shared
    if 0 < shared_memory <= DECLARED_SHARED_MEMORY:
        # If asked for any, XLA has the driver give up the L1 cache for it (cuFuncSetCacheConfig).
        ptx, declared = re.subn(r"\.extern (\.shared .*)\[\];", rf"\g<1>[{shared_memory}];", ptx)
        shared_memory = 0 if declared else shared_memory
    return Kernel(
        name=compiled.metadata.name,
        ptx=ptx,
        grid=(*lowered.grid, 1, 1)[:3],
        threads=32 * compiled.metadata.num_warps,
        shared_memory=shared_memory,
        pointers=re.search(r"\.entry \w+\((.*?)\)", ptx, re.DOTALL)[1].count(".param"),
    )


def _launch_attributes(kernel: Kernel, outputs: range) -> dict[str, ir.Attribute]:
    """What XLA wants to be told of a kernel, whose pointers to results are those in `outputs`."""
    int32 = functools.partial(ir.IntegerAttr.get, ir.IntegerType.get_signless(32))
    sizes = dict(zip(("grid_x", "grid_y", "grid_z"), kernel.grid, strict=True))
    sizes |= {"block_x": kernel.threads, "block_y": 1, "block_z": 1}
    sizes |= {"shared_mem_bytes": kernel.shared_memory}
    return {
        "name": ir.StringAttr.get(kernel.name),
        "kernel_type": ir.StringAttr.get("ptx"),
        "kernel_data": ir.StringAttr.get(kernel.ptx),
        "output_indices": ir.ArrayAttr.get([int32(index) for index in outputs]),
        **{name: int32(size) for name, size in sizes.items()},
    }


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
