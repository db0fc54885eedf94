"""The gated MLP of a Hugging Face tower, where its width shuts out the fast matrix kernels.

Those take only rows of whole 16 bytes. Qwen2.5-VL 7B's MLP is 3420 wide, which is 6,840 bytes in 16
bits, and its last product takes 3.8 times as long as one of 3456. So that product's operands, the
activation and a copy of the weight, are laid out with rows of 3456, filled up with zeros, which
changes no result.

Where gradients are recorded, `recorded_mlp` computes all three products at that width.

The parameters stay as they are. The copy is made in every call, by the kernel that multiplies and
activates: of what is not remembered nothing can be older than the parameter, however that is
changed, and a CUDA graph makes it too. PyTorch has four kernels for what is one here.
"""

import torch
import torch.nn.functional as F
from torch import nn

from triton_kernels.integrations.layers import StandIn
from triton_kernels.integrations.plain import is_own, plain_parameters
from triton_kernels.integrations.recorded_mlp import RecordedMLP, filled
from triton_kernels.kernels.gated import aligned_operands_kernel
from triton_kernels.launching.descriptors import Tile, can_describe
from triton_kernels.launching.fast_path import goes_unseen, plans
from triton_kernels.launching.launch import Call, binary_of, launch_kernel
from triton_kernels.launching.table import Launch, next_power_of_2

try:
    from transformers.activations import SiLUActivation
except ImportError:  # transformers 4.57 has PyTorch's
    _SILUS = (nn.SiLU,)
else:
    _SILUS = (nn.SiLU, SiLUActivation)

# In bytes: the fast matrix kernels take rows of whole 16, and like those of whole 128.
_ACCEPTED = 16
_STORED = 128

# A tile has 128 rows and as many columns of each of gate and up, for which 64 channels are
# multiplied at a time, up to four times as many having been loaded. 8 tiles of rows share columns.
_LAUNCH = Launch(block=128, block_k=64, num_warps=8, num_stages=4)
_GROUP = 8
_COPIED = 8  # rows of the weight that a program copies at a time
_INTERPRETED_PROGRAMS = 2  # fewer than there is to do, so that it loops
_NO_CALL = "the kernel is not for these"

# Activations that the kernel knows, as PyTorch and transformers have them.
_SILU = {cls: cls.forward for cls in _SILUS}

# Weight and bias of gate, of up and of down.
_Operands = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]


class AlignedMLP(StandIn):
    """down(silu(gate(x)) x up(x)), the last product's operands aligned while it is computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [tokens, channels] to the same."""
        if not is_misaligned(x, self.intermediate_size):
            return super().forward(x)
        down = plain_parameters(self._modules["down_proj"])
        if down is None:
            return super().forward(x)
        weight, bias = down
        operands = self._operands(x, weight, bias)
        if operands is not None:
            recorded = torch.is_grad_enabled() and any(p.requires_grad for p in (x, *operands))
            autocast = torch.is_autocast_enabled(x.device.type)
            dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
            alike = autocast or all(p.dtype == dtype for p in operands)
            if alike and not (recorded or autocast):
                return F.linear(*aligned_operands(x, *operands[:-1]), bias)
            if alike and recorded and goes_unseen((x,), recorded=True):
                stored = _aligned(weight.shape[1], dtype.itemsize)
                return RecordedMLP.apply(stored, x.to(dtype), *operands)
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        stored = aligned_width(weight)
        return F.linear(filled(hidden, stored), filled(weight, stored), bias)

    def _operands(self, x: torch.Tensor, *down: torch.Tensor | None) -> _Operands | None:
        """Weight and bias of gate, up and down; None where modules have to be called one by one."""
        modules = self._modules
        gate, up = plain_parameters(modules["gate_proj"]), plain_parameters(modules["up_proj"])
        if gate is None or up is None or not is_own(modules["act_fn"], _SILU):
            return None
        operands, device = (*gate, *up, *down), x.device
        if x.ndim != 2 or any(p is None or p.device != device for p in operands):
            return None
        return operands


def is_misaligned(x: torch.Tensor, width: int) -> bool:
    """Whether x is on a GPU whose fast kernels refuse rows of this width, in x's dtype."""
    if not x.is_cuda:
        return False
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else x.dtype
    return width * dtype.itemsize % _ACCEPTED != 0


def aligned_width(weight: torch.Tensor) -> int:
    """The width at which a weight's rows are stored: 3420 in 16 bits becomes 3456."""
    return _aligned(weight.shape[1], weight.itemsize)


def _aligned(width: int, itemsize: int) -> int:
    unit = _STORED // itemsize
    return -(-width // unit) * unit


def aligned_operands(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_aligned_operands`, by the operator where the call would be missed.

    That is slower to call.
    """
    find = _aligned_operands if goes_unseen((x,)) else _operator
    return find(x, *weights)


def _aligned_operands(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor,
    down_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the last product multiplies: silu(gate) x up, and the weight, filled up with zeros.

    Args:
        x: [tokens, channels], of the parameters' dtype and device.
        gate_weight, up_weight: [width, channels], contiguous.
        gate_bias, up_bias: [width].
        down_weight: [rows, width], contiguous.

    Returns:
        [tokens, stored] and [rows, stored], stored being `aligned_width`.
    """
    (tokens, channels), (rows, width) = x.shape, down_weight.shape
    read = gate_bias.data_ptr(), up_bias.data_ptr(), down_weight.data_ptr()
    at_16 = read[2] % _ACCEPTED == 0
    swapped = up_weight.data_ptr() < gate_weight.data_ptr()
    form = x.dtype, x.device, tokens, rows, channels, width, at_16, swapped
    call = plans.get(form)
    if call is None:
        call = plans[form] = _call(*form) if runs_kernel(x) else _NO_CALL
    stored = aligned_width(down_weight)
    if call is _NO_CALL:
        hidden = F.silu(F.linear(x, gate_weight, gate_bias)) * F.linear(x, up_weight, up_bias)
        return filled(hidden, stored), filled(down_weight, stored)
    hidden, weight = x.new_empty(tokens, stored), x.new_empty(rows, stored)
    first, apart = _as_one(*((up_weight, gate_weight) if swapped else (gate_weight, up_weight)))
    tiles = call.tiles
    tiles = tiles[0], tiles[1]._replace(strides=(apart, channels, 1)), tiles[2]
    call = call._replace(tiles=tiles)
    described = _described(x), first, hidden
    tensors = *described, gate_bias, up_bias, down_weight, weight
    addresses = (*read, weight.data_ptr()), [each.data_ptr() for each in described]
    # Triton launches on the current device. Asking for it takes less than to set it.
    if call.device is None or call.device == torch.cuda.current_device():
        launch_kernel(call, tensors, *addresses)
    else:
        with torch.cuda.device(call.device):
            launch_kernel(call, tensors, *addresses)
    return hidden, weight


def runs_kernel(x: torch.Tensor) -> bool:
    """Whether the kernel multiplies rows of these: of 16-bit numbers, where it was measured."""
    if not x.is_cuda or x.itemsize != 2 or x.shape[1] * x.itemsize % _ACCEPTED != 0:
        return False
    return torch.cuda.get_device_capability(x.device) == (9, 0)


def _as_one(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Two weights as one tensor of three axes: where it begins, and its first stride in elements.

    A descriptor takes any stride. So the weights' tiles come by one copy, wherever they lie.
    """
    places = first.data_ptr(), second.data_ptr()
    apart = (places[1] - places[0]) // first.itemsize
    if (places[0] | places[1]) % _ACCEPTED or not can_describe((apart,)):  # or one is the other
        first, apart = torch.stack((first, second)), first.numel()
    return first, apart


def _described(x: torch.Tensor) -> torch.Tensor:
    """A tensor that a descriptor can describe: x, or a copy."""
    x = x.contiguous()
    return x if x.data_ptr() % _ACCEPTED == 0 else x.clone()


def _call(
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    rows: int,
    channels: int,
    width: int,
    at_16: bool,
    swapped: bool,
) -> Call:
    """The launch; how far the weights lie apart is each call's own."""
    stored = _aligned(width, dtype.itemsize)
    kernel, block, depth = aligned_operands_kernel, _LAUNCH.block, _LAUNCH.block_k
    tiles = (
        Tile(0, (tokens, channels), (channels, 1), [block, depth]),
        Tile(1, (2, width, channels), (0, channels, 1), [2, block, depth]),
        Tile(2, (tokens, stored), (stored, 1), [block, block]),
    )
    constants = channels, width, stored, rows, block, depth, _GROUP, _COPIED
    constants = *constants, next_power_of_2(stored), swapped
    binary = binary_of(kernel, (dtype,), device, constants, _LAUNCH) if at_16 else None
    programs = _INTERPRETED_PROGRAMS
    if device.type == "cuda":
        programs = torch.cuda.get_device_properties(device).multi_processor_count
    return Call(kernel, programs, _LAUNCH, (tokens,), constants, device.index, binary, tiles)


_operator = torch.library.custom_op(
    "fused_rope_attention::aligned_operands", _aligned_operands, mutates_args=()
)


@_operator.register_fake
def _(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = weights[-1]
    stored = aligned_width(weight)
    return x.new_empty(x.shape[0], stored), weight.new_empty(weight.shape[0], stored)
