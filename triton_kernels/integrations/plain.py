"""Whether a layer's weight may be read instead of calling the layer."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_LINEAR = {nn.Linear: nn.Linear.forward}
_TENSORS = (nn.Parameter, torch.Tensor)


def is_plain(linear: nn.Module) -> bool:
    """Whether calling a layer is the product with its weight and bias, and nothing else.

    Then they may be read instead. Adapters, quantised, pruned and parametrised layers, sharded,
    partitioned and offloaded weights, and whoever hooks the layer or replaces its forward, need the
    call.
    """
    return plain_parameters(linear) is not None


def plain_parameters(linear: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight and bias of a layer that `is_plain`; None of another."""
    if not is_own(linear, _LINEAR):
        return None
    held = linear._parameters  # an attribute of a module takes the host a microsecond to find
    if "weight" not in held:  # FSDP puts plain tensors in the parameters' place
        held = vars(linear) | held
    weight, bias = held["weight"], held["bias"]
    shape = linear.out_features, linear.in_features
    if type(weight) not in _TENSORS or weight.shape != shape:
        return None
    if weight.is_meta or not weight.is_contiguous():
        return None
    if bias is not None and (type(bias) not in _TENSORS or bias.shape != shape[:1]):
        return None
    return weight, bias


def plain_weight(norm: nn.Module, forward: Callable) -> torch.Tensor | None:
    """The weight of a norm whose call is a forward and nothing else; None of another."""
    if not is_own(norm, {type(norm): forward}):
        return None
    held = norm._parameters
    if "weight" not in held:  # as above
        held = vars(norm) | held
    weight = held["weight"]
    plain = type(weight) in _TENSORS and weight.ndim == 1 and weight.is_contiguous()
    return weight if plain and not weight.is_meta else None


def is_own(module: nn.Module, forwards: dict[type[nn.Module], Callable]) -> bool:
    """Whether a module runs one of these forwards of these classes, and nobody hooks its calls."""
    cls = type(module)
    return forwards.get(cls) is cls.forward and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()
        or "forward" in module.__dict__
    )
