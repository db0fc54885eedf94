"""Descriptors of tensors, by which a GPU's copy engine (TMA) loads tiles of them."""

from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
except ImportError:  # experimental as Gluon is, versions to come may have it elsewhere
    gl = None

# What the strides of a descriptor are below, in bytes.
_STRIDE_LIMIT = 2**40


class Address(NamedTuple):
    """What stands for a tensor in a descriptor."""

    address: int

    def data_ptr(self) -> int:
        """As of a tensor."""
        return self.address


class Tile(NamedTuple):
    """A descriptor, but for the tensor's address."""

    tensor: int  # its place among those that a call's tiles are of
    shape: tuple[int, ...]  # of the tensor, as strides
    strides: tuple[int, ...]
    block: list[int]  # of a tile, as many axes
    layout: "gl.NVMMASharedLayout | None" = None  # of the tile in shared memory; else Triton's

    def of(self, base: torch.Tensor | Address) -> "TensorDescriptor | GluonDescriptor":
        """The descriptor for the tensor of one call."""
        # Its constructor takes microseconds to check what these are known to fulfil.
        descriptor = object.__new__(TensorDescriptor if self.layout is None else GluonDescriptor)
        descriptor.base = base
        descriptor.shape, descriptor.strides = self.shape, self.strides
        descriptor.block_shape = self.block
        if self.layout is not None:
            descriptor.layout = self.layout
        return descriptor


def make_tile(
    tensor: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: list[int],
) -> Tile:
    """A tile of 16-bit numbers that tensor cores read."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return Tile(tensor, shape, strides, block, layout)


def can_describe(strides: tuple[int, ...]) -> bool:
    """Whether a descriptor can have these strides, multiples of 8, of 16-bit numbers."""
    return all(0 < 2 * stride < _STRIDE_LIMIT for stride in strides)
