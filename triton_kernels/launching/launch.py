"""Launching one kernel, without Triton's slow look at every argument of every launch."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from triton_kernels.launching.descriptors import Address, Tile
from triton_kernels.launching.table import Launch

# A tensor that a kernel reads or writes: its address; the tensor; and None, or which part along the
# second axis is meant, whose address it is then. To make a view of it takes longer than a launch.
Operand = tuple[int, torch.Tensor, int | None]


def operand(x: torch.Tensor) -> Operand:
    """A whole tensor as an operand."""
    return x.data_ptr(), x, None


@dataclass(slots=True)
class Binary:
    """A kernel's machine code, known once Triton has been asked for it."""

    # None until then, and always in the interpreter, which compiles nothing.
    compiled: CompiledKernel | None = None


class Call(NamedTuple):
    """All of a launch but its tensors."""

    kernel: JITFunction  # takes descriptors, the tensors, the numbers and the constants
    programs: int  # of a one-dimensional grid
    launch: Launch
    numbers: tuple[int | float, ...]  # sizes, scale and strides
    constants: tuple[Any, ...]  # what the kernel is compiled for
    device: int | None  # index of the GPU; None for the CPU, where Triton interprets
    binary: Binary | None  # see `binary_of`; None where Triton has to look at each call
    tiles: tuple[Tile, ...] = ()  # what the kernel takes descriptors of
    # It may start before the kernel in front of it has ended, for which it waits itself (CUDA's
    # programmatic dependent launch); the same for all calls of a kernel.
    overlap: bool = False


# One for each kind of call, however many sizes there are: no size is in the key.
@functools.cache
def binary_of(
    kernel: JITFunction,
    dtype: torch.dtype,
    device: torch.device,
    constants: tuple[Any, ...],
    launch: Launch,
) -> Binary:
    """The binary for all calls of one kind: tensors aligned, of a dtype and device; numbers 32-bit.

    It depends on nothing else, since such numbers are not specialized on.
    """
    return Binary()


def launch_kernel(
    call: Call, operands: Iterable[Operand], described: Sequence[Operand] = ()
) -> None:
    """Launch a call on the current device.

    By addresses where its binary is known, as for a tensor Triton would ask the driver whose memory
    it is. The kernel takes addresses of operands; the call's tiles are of `described`.
    """
    compiled = None if call.binary is None else call.binary.compiled
    if compiled is not None and not _hooked():
        descriptors = [tile.of(Address(described[tile.tensor][0])) for tile in call.tiles]
        stream = driver.active.get_current_stream(call.device)
        hooks = (None, None, None)  # gathering what they would be told takes Triton microseconds
        compiled.run(
            call.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, *hooks,
            *descriptors, *[address for address, _, _ in operands], *call.numbers, *call.constants,
        )  # fmt: skip
        return
    options = call.launch
    compiled = call.kernel[(call.programs,)](
        *[tile.of(_tensor(described[tile.tensor])) for tile in call.tiles],
        *map(_tensor, operands),
        *call.numbers,
        *call.constants,
        num_warps=options.num_warps,
        num_stages=options.num_stages,
        maxnreg=options.maxnreg,
        enable_fp_fusion=True,
        launch_pdl=call.overlap,
    )
    # The interpreter returns none.
    if call.binary is not None and isinstance(compiled, CompiledKernel):
        call.binary.compiled = compiled


def _tensor(operand: Operand) -> torch.Tensor:
    _, x, part = operand
    return x if part is None else x.select(1, part)


def _hooked() -> bool:
    """Whether a profiler asked Triton to be told of launches."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
