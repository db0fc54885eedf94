"""One small call through a module's own attention and through ours.

With weights and inputs of its own, on the CPU: nothing of the module is called, moved or changed,
and its weights may lie anywhere.
"""

import types

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from triton_kernels.integrations.forms import Form
from triton_kernels.integrations.layers import FusedAttention, stand_in

_CU_SEQLENS = (0, 5, 5, 9)
_CHANNELS = 16


def deviation(attention: nn.Module, form: Form) -> float:
    """Relative RMS error of ours against the attention of Hugging Face that a form is said of."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        _disable_current_modes(),  # of a trace, for instance
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    ):
        generator = torch.Generator().manual_seed(0)
        own = _small_twin(attention, form, generator)
        call = _call(attention.head_dim, form, generator)
        expected = own.forward(**call)
        stand_in(own, FusedAttention)
        own.form = form
        result = own.forward(**call)
        if form.weighed:
            (expected, _), (result, _) = expected, result
        return float((result - expected).norm() / expected.norm())


def _small_twin(attention: nn.Module, form: Form, generator: torch.Generator) -> nn.Module:
    """A module of the same class and settings, with small layers in fp32 and nobody's hooks."""
    twin = object.__new__(type(attention))  # what a sharded class makes is of another one
    nn.Module.__init__(twin)
    settings = vars(attention).items()
    vars(twin).update((name, value) for name, value in settings if name not in vars(twin))
    twin.eval()
    twin.config = types.SimpleNamespace(_attn_implementation="eager")
    width = attention.num_heads * attention.head_dim
    inputs = dict.fromkeys(form.inputs, (_CHANNELS, 3 * width // len(form.inputs)))
    for name, sizes in (inputs | {form.output: (width, _CHANNELS)}).items():
        layer = nn.Linear(*sizes, bias=False, device="meta")  # draws nothing
        weight = _normal(layer.weight.shape, generator) * sizes[0] ** -0.5
        layer.weight = nn.Parameter(weight, requires_grad=False)
        twin.add_module(name, layer)
    return twin


def _call(head_dim: int, form: Form, generator: torch.Generator) -> dict:
    tokens = _CU_SEQLENS[-1]
    angles = 3 * _normal((tokens, head_dim // 2), generator)
    both = angles.repeat(1, 2)
    positions = (both.cos(), both.sin()) if form.angles is None else angles
    return {
        "hidden_states": _normal((tokens, _CHANNELS), generator),
        "cu_seqlens": torch.tensor(_CU_SEQLENS, dtype=torch.int32),
        form.angles or "position_embeddings": positions,
    }


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32)
