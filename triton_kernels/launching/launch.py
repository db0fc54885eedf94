"""Launching one kernel, without Triton's slow look at every argument of every launch."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from triton_kernels.launching.descriptors import Address, Tile
from triton_kernels.launching.table import Launch


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
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    constants: tuple[Any, ...],
    launch: Launch,
) -> Binary:
    """The binary for all calls of one kind: tensors aligned, of these dtypes; numbers 32-bit.

    It depends on nothing else, since such numbers are not specialized on.
    """
    return Binary()


def launch_kernel(
    call: Call,
    tensors: Sequence[torch.Tensor],
    addresses: Sequence[int | None],
    described: Sequence[int] = (),
) -> None:
    """Launch a call on the current device.

    By addresses where its binary is known: to make a view, or to have Triton ask the driver whose
    memory a tensor is, takes longer than a launch. Else by the tensors that begin there.

    Args:
        call: what is launched.
        tensors: all that addresses lie in; of a packed one or of rotated rows at one of its parts.
        addresses: what the kernel takes; None for a tensor that this one does without.
        described: what the call's tiles are of.
    """
    compiled = None if call.binary is None else call.binary.compiled
    if compiled is not None and not _hooked():
        descriptors = [tile.of(Address(described[tile.tensor])) for tile in call.tiles]
        stream = driver.active.get_current_stream(call.device)
        hooks = (None, None, None)  # gathering what they would be told takes Triton microseconds
        compiled.run(
            call.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, *hooks,
            *descriptors, *addresses, *call.numbers, *call.constants,
        )  # fmt: skip
        return
    options = call.launch
    compiled = call.kernel[(call.programs,)](
        *[tile.of(_tensor_at(described[tile.tensor], tensors)) for tile in call.tiles],
        *[_tensor_at(address, tensors) for address in addresses],
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


def _tensor_at(address: int | None, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor, or else the part of one along its second axis, that begins at an address."""
    if address is None:
        return None
    parts = (part for x in tensors if x.ndim > 2 for part in x.unbind(1))
    return next(x for x in itertools.chain(tensors, parts) if x.data_ptr() == address)


def _hooked() -> bool:
    """Whether a profiler asked Triton to be told of launches."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
