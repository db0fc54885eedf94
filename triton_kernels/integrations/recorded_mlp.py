"""The gated MLP while its gradients are recorded, at an aligned width.

Rows of 3420 shut the products of the backward pass out of the fast matrix kernels too: they read
gradients of gate and up that lie in such rows. Here gate and up are one product of 2 x 3456
columns. Its weight is put together from the parameters, with zeros behind each, and put together
again in the backward pass. So nothing is kept but the input, that product's result, and the
parameters as autograd keeps them, which may be sharded or offloaded between the passes.
"""

from typing import Any

import torch
import torch.nn.functional as F


class RecordedMLP(torch.autograd.Function):
    """down(silu(gate(x)) x up(x)) of x [tokens, channels], weights and biases of gate, up, down.

    `stored` is the width at which rows of gate and up lie. Products are of the dtype of x, which
    parameters are cast to.
    """

    @staticmethod
    def forward(ctx: Any, stored: int, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """-> [tokens, channels]."""
        gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias = parameters
        weight = _one_behind_another(x.dtype, stored, gate_weight, up_weight)
        both = F.linear(x, weight, _one_behind_another(x.dtype, stored, gate_bias, up_bias))
        gate, up = both.chunk(2, 1)
        ctx.stored = stored
        ctx.save_for_backward(both, x, *parameters)
        down = filled(down_weight.to(x.dtype), stored)
        return F.linear(F.silu(gate).mul_(up), down, down_bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Of what is needed, by the roundings of the separate steps."""
        both, x, *parameters = ctx.saved_tensors  # checkpoints let them be asked for once
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # what is computed here is differentiated again
            return None, *_differentiated(grad, [x, *parameters], needed)
        gate_weight, _, up_weight, _, down_weight, _ = parameters
        needs_x, *needs = needed
        (width, _), stored = gate_weight.shape, ctx.stored
        gate, up = both.chunk(2, 1)
        activated, both_grad = F.silu(gate), torch.empty_like(both)
        gate_grad, up_grad = both_grad.chunk(2, 1)
        found: list[torch.Tensor | None] = [None] * 7
        if any(needs[4:]):
            found[5] = (grad.T @ (activated * up))[:, :width]
            found[6] = grad.sum(0)
        hidden_grad = grad @ filled(down_weight.to(x.dtype), stored)
        torch.mul(hidden_grad, activated, out=up_grad)
        hidden_grad.mul_(up)
        torch.ops.aten.silu_backward.grad_input(hidden_grad, gate, grad_input=gate_grad)
        if any(needs[:4]):
            weight_grad, bias_grad = both_grad.T @ x, both_grad.sum(0)
            found[1:5] = (
                each[start : start + width]
                for start in (0, stored)
                for each in (weight_grad, bias_grad)
            )
        if needs_x:
            found[0] = both_grad @ _one_behind_another(x.dtype, stored, gate_weight, up_weight)
        return None, *(each if n else None for each, n in zip(found, needed, strict=True))


def _one_behind_another(dtype: torch.dtype, stored: int, *each: torch.Tensor) -> torch.Tensor:
    """Rows of each, with zeros behind them, in one tensor."""
    first = each[0]
    result = first.new_zeros((len(each), stored, *first.shape[1:]), dtype=dtype)
    for part, x in zip(result, each, strict=True):
        part[: x.shape[0]] = x
    return result.flatten(0, 1)


def filled(x: torch.Tensor, stored: int) -> torch.Tensor:
    """Rows, filled up with zeros to the width at which they are stored."""
    return F.pad(x, (0, stored - x.shape[-1]))


def _differentiated(
    grad: torch.Tensor, tensors: list[torch.Tensor], needed: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """The gradients by autograd, of the separate steps."""
    x, *parameters = tensors = [each.view_as(each) for each in tensors]  # none is of another
    gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias = (
        each.to(x.dtype) for each in parameters
    )
    hidden = F.silu(F.linear(x, gate_weight, gate_bias)) * F.linear(x, up_weight, up_bias)
    out = F.linear(hidden, down_weight, down_bias)
    wanted = [each for each, n in zip(tensors, needed, strict=True) if n]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if n else None for n in needed]
