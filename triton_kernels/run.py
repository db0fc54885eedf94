"""Launching a kernel, which Triton makes slow: it looks at every argument of every call."""

from typing import Any

from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from triton_kernels.launch_table import Launch

# As many binaries as there are kinds of calls: nothing of a call's size is in the key.
_compiled: dict[tuple, CompiledKernel] = {}


def run(
    kernel: JITFunction,
    programs: int,
    launch: Launch,
    aligned: bool,
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
) -> None:
    """Run kernel(*arguments, *constants) on a one-dimensional grid.

    Of aligned tensors the binary depends on nothing but the first one's dtype and device, the
    constants and the launch, since numbers are not specialised on: it is taken from a dictionary.
    """
    x = arguments[0]
    key = (kernel.__name__, x.dtype, x.device, constants, launch) if aligned else None
    compiled = _compiled.get(key)
    if compiled is not None and not _hooked():
        stream = driver.active.get_current_stream(x.device.index)
        binary, metadata = compiled.function, compiled.packed_metadata
        hooks = (None, None, None)  # what Triton would gather for a profiler takes it microseconds
        compiled.run(programs, 1, 1, stream, binary, metadata, *hooks, *arguments, *constants)
        return
    compiled = kernel[(programs,)](
        *arguments,
        *constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        maxnreg=launch.maxnreg,
        enable_fp_fusion=True,
    )
    if aligned and isinstance(compiled, CompiledKernel):  # the interpreter returns none
        _compiled[key] = compiled


def _hooked() -> bool:
    """Whether a profiler asked Triton to be told of launches."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
