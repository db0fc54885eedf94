"""The gated MLP of a Hugging Face tower, where its width shuts out the fast matrix kernels.

Those take only rows of whole 16 bytes. Qwen2.5-VL 7B's MLP is 3420 wide, which is 6,840 bytes in 16
bits, and its last product takes 3.8 times as long as one of 3456. So that product's operands, the
activation and a copy of the weight, are laid out with rows of 3456, filled up with zeros, which
changes no result.

The parameters stay as they are. The copy is made in every call, by the kernel that activates: of
what is not remembered nothing can be older than the parameter, however that is changed, and a CUDA
graph makes it too. PyTorch's activation is two kernels, this one with the copy is one.
"""

import torch
import torch.nn.functional as F
from torch import nn

from triton_kernels.integrations.layers import StandIn
from triton_kernels.integrations.plain import is_own, plain_parameters
from triton_kernels.kernels.gated import aligned_operands_kernel
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

# A program has one row; a row of 3,456 channels is 16 values a thread.
_LAUNCH = Launch(block=1, block_k=1, num_warps=8, num_stages=1)

# Activations that the kernel knows, as PyTorch and transformers have them.
_SILU = {cls: cls.forward for cls in _SILUS}

# x, weight and bias of gate and of up, and the weight of down.
_Operands = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]


class AlignedMLP(StandIn):
    """down(silu(gate(x)) x up(x)), the last product's operands aligned while it is computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [tokens, channels] to the same."""
        if not is_misaligned(x, self.intermediate_size):
            return super().forward(x)
        down = plain_parameters(self.down_proj)
        if down is None:
            return super().forward(x)
        weight, bias = down
        operands = self._operands(x, weight, bias)
        if operands is not None:
            # The operator is slower to call: it is for who would miss the call.
            find = _aligned_operands if goes_unseen((x,)) else _operator
            return F.linear(*find(*operands), bias)
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        tail = 0, aligned_width(weight) - weight.shape[1]
        return F.linear(F.pad(hidden, tail), F.pad(weight, tail), bias)

    def _operands(self, x: torch.Tensor, *down: torch.Tensor | None) -> _Operands | None:
        """What `_aligned_operands` takes; None where the modules have to be called one by one."""
        gate, up = plain_parameters(self.gate_proj), plain_parameters(self.up_proj)
        if gate is None or up is None or not is_own(self.act_fn, _SILU):
            return None
        parameters = *gate, *up, *down
        recorded, dtype, device = torch.is_grad_enabled(), x.dtype, x.device
        for p in parameters:
            if p is None or p.dtype != dtype or p.device != device:
                return None
            if recorded and p.requires_grad:
                return None
        if (recorded and x.requires_grad) or x.ndim != 2:
            return None
        if torch.is_autocast_enabled(device.type):
            return None
        return x, *parameters[:-1]


def is_misaligned(x: torch.Tensor, width: int) -> bool:
    """Whether x is on a GPU whose fast kernels refuse rows of this width, in x's dtype."""
    if not x.is_cuda:
        return False
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else x.dtype
    return width * dtype.itemsize % _ACCEPTED != 0


def aligned_width(weight: torch.Tensor) -> int:
    """The width at which a weight's rows are stored: 3420 in 16 bits becomes 3456."""
    unit = _STORED // weight.itemsize
    return -(-weight.shape[1] // unit) * unit


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
    x = x.contiguous()
    (tokens, channels), (rows, width) = x.shape, down_weight.shape
    stored = aligned_width(down_weight)
    hidden, weight = x.new_empty(tokens, stored), x.new_empty(rows, stored)
    # Fast kernels write whole 16 bytes of a row; the columns behind them are the kernel's.
    whole = width - width % (_ACCEPTED // x.itemsize)
    # A product of fp16 may be too large for fp16 before its bias is added.
    biased = x.dtype != torch.float16
    gate, up = (
        F.linear(x, weight[:whole], None if biased else bias[:whole])
        for weight, bias in ((gate_weight, gate_bias), (up_weight, up_bias))
    )
    tensors = (
        x, gate, up, gate_weight, up_weight, gate_bias, up_bias, down_weight, hidden, weight,
    )  # fmt: skip
    addresses = [tensor.data_ptr() for tensor in tensors]
    at_16 = all(address % 16 == 0 for address in addresses)
    form = x.dtype, x.device, tokens, rows, channels, whole, width, stored, biased, at_16
    call = plans.get(form)
    if call is None:
        call = plans[form] = _call(*form)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        launch_kernel(call, tensors, addresses)
    return hidden, weight


def _call(
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    rows: int,
    channels: int,
    whole: int,
    width: int,
    stored: int,
    biased: bool,
    at_16: bool,
) -> Call:
    kernel = aligned_operands_kernel
    powers = [next_power_of_2(size) for size in (channels, stored, width - whole)]
    constants = channels, whole, width, stored, *powers, biased
    binary = binary_of(kernel, dtype, device, constants, _LAUNCH) if at_16 else None
    return Call(kernel, tokens + rows, _LAUNCH, (tokens,), constants, device.index, binary)


_operator = torch.library.custom_op(
    "fused_rope_attention::aligned_operands", _aligned_operands, mutates_args=()
)


@_operator.register_fake
def _(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = weights[-1]
    stored = aligned_width(weight)
    return x.new_empty(x.shape[0], stored), weight.new_empty(weight.shape[0], stored)
