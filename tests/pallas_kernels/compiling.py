"""Compiling Pallas kernels by the Triton package in tests: needs that package and PyTorch."""

import contextlib
import subprocess
from dataclasses import dataclass, field
from typing import Any

from pallas_kernels.launching import choose, triton_lowering
from pallas_kernels.launching.compile import compiling_by
from pallas_kernels.launching.table import Gpu
from tests.pallas_kernels.no_gpu import hide_gpus


@dataclass
class Found:
    """What was compiled: IR, what Triton made of it, and what XLA launches."""

    irs: list[str] = field(default_factory=list)
    compiled: list[Any] = field(default_factory=list)
    kernels: list[triton_lowering.Kernel] = field(default_factory=list)


@contextlib.contextmanager
def noting_kernels(monkeypatch):
    """The kernels of calls that are lowered, compiled with an H200's launches.

    All are the Triton backend's, whatever GPU is here.
    """
    noted = Found()
    compile_ir, kernel = triton_lowering.compile_ir, triton_lowering._kernel

    def noting_ir(ir, *arguments):
        noted.irs.append(ir)
        noted.compiled.append(compile_ir(ir, *arguments))
        return noted.compiled[-1]

    def noting_kernel(*arguments):
        noted.kernels.append(kernel(*arguments))
        return noted.kernels[-1]

    noting_ir.cache_clear = compile_ir.cache_clear
    monkeypatch.setattr(triton_lowering, "compile_ir", noting_ir)
    monkeypatch.setattr(triton_lowering, "_kernel", noting_kernel)
    monkeypatch.setattr(choose, "gpu", lambda: Gpu("NVIDIA H200", "9.0"))
    hide_gpus(monkeypatch)
    with compiling_by("triton"):
        yield noted


def assemble(ptx, tmp_path):
    """The machine code that Triton's assembler makes of PTX."""
    import triton

    source, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    source.write_text(ptx)
    command = [triton.knobs.nvidia.ptxas.path, "-arch", "sm_90a", source, "-o", cubin]
    subprocess.run(command, check=True)
    return cubin.read_bytes()
