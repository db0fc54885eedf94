"""An MLP with a tanh GELU, which the product in front of it applies: cuBLAS does so on the way.

By itself it is a pass over the MLP's width, which is read and written once more.
"""

import torch
import torch.nn.functional as F
from torch import nn

from triton_kernels.integrations.layers import StandIn
from triton_kernels.integrations.plain import plain_parameters

try:
    from transformers.activations import GELUTanh
except ImportError:  # without transformers there are none of its MLPs
    GELUTanh = None


class ActivatedMLP(StandIn):
    """linear_fc2(act_fn(linear_fc1(x))), a tanh GELU being applied by the first product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [tokens, channels] to the same."""
        modules = self._modules
        first = plain_parameters(modules["linear_fc1"])
        if first is None or not is_tanh_gelu(modules["act_fn"]) or not takes_gelu(x, *first):
            return super().forward(x)
        weight, bias = first
        return modules["linear_fc2"](torch._addmm_activation(bias, x, weight.t(), use_gelu=True))


def is_tanh_gelu(activation: object) -> bool:
    """Whether it is the tanh approximation of GELU, as PyTorch or transformers have it."""
    if type(activation) is nn.GELU:
        return activation.approximate == "tanh"
    if GELUTanh is None or type(activation) is not GELUTanh:
        return False
    used = activation.act  # in Python, if somebody asked for that
    return getattr(used, "func", None) is F.gelu and used.keywords == {"approximate": "tanh"}


def takes_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a product applies it, x [tokens, channels]: in 16 bits, to which cuBLAS' is exact."""
    if torch.compiler.is_compiling() or not runs_gelu(x) or x.ndim != 2 or bias is None:
        return False
    if any(p.dtype != x.dtype or p.device != x.device for p in (weight, bias)):
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in (x, weight, bias)))


def runs_gelu(x: torch.Tensor) -> bool:
    """Whether cuBLAS would: on a CPU the operator is the exact GELU."""
    return x.is_cuda and x.itemsize == 2
