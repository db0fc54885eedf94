"""A residual sum and the LayerNorm of it, in one kernel.

Inductor makes one kernel of both too, but goes through rows of more than 1,024 channels twice: over
3,136 tokens of 1,152 channels it takes 16 us on an H200, where a copy of as many bytes takes 8. The
twin has none: there the sum is within the product before it, and XLA holds a norm's rows.
"""

import torch
import torch.nn.functional as F
from torch import nn

from triton_kernels.attend import runs_kernel
from triton_kernels.checks import is_exporting
from triton_kernels.integrations.layer_norm import LAUNCH, has_rows
from triton_kernels.integrations.plain import is_own
from triton_kernels.kernels.layer_norm import layer_norm_kernel
from triton_kernels.launching.table import next_power_of_2

_LAYER_NORM = {nn.LayerNorm: nn.LayerNorm.forward}


def sum_and_norm(
    residual: torch.Tensor, branch: torch.Tensor, norm: nn.Module, implementation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + branch and the norm of that, without gradients.

    Args:
        residual, branch: [tokens, hidden] of one dtype; the sum may be written over the first.
        norm: of [tokens, hidden]. One that is no LayerNorm with a weight and a bias, or that
            somebody hooks, is called.
        implementation: as in `triton_kernels`.

    Returns:
        Both, [tokens, hidden] in the dtype of the residual stream. A LayerNorm's is of the sum as
        it is before that is rounded.
    """
    is_plain = has_rows(norm) and is_own(norm, _LAYER_NORM)
    if is_plain and residual.is_contiguous() and not is_exporting():
        parameters = norm.weight, norm.bias, norm.eps
        return residual, _add_and_norm(residual, branch, *parameters, implementation)
    summed = residual + branch
    return summed, norm(summed)


# Writes into the residual stream, which PyTorch's compiler would otherwise copy first.
@torch.library.custom_op("residual_stream::add_and_norm", mutates_args=("residual",))
def _add_and_norm(
    residual: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    implementation: str,
) -> torch.Tensor:
    run = _kernel if runs_kernel(residual.device, implementation) else _reference
    return run(residual, branch, weight, bias, eps)


@_add_and_norm.register_fake
def _(residual: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(residual)


def _reference(
    residual: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    x = residual.float() + branch
    residual.copy_(x)
    return F.layer_norm(x, weight.shape, weight.float(), bias.float(), eps).to(residual.dtype)


def _kernel(
    residual: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    tokens, hidden = residual.shape
    normed = torch.empty_like(residual)
    with torch.cuda.device_of(residual):  # Triton launches on the current device
        layer_norm_kernel[(tokens,)](
            residual, branch.contiguous(), weight.contiguous(), bias.contiguous(), normed, eps,
            hidden, next_power_of_2(hidden),
            num_warps=LAUNCH.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return normed
