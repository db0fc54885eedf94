"""One small call through a module's own attention and through ours.

With weights and inputs of its own, on the CPU: nothing of the module is called, moved or changed,
and its weights may lie anywhere.
"""

import types

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from triton_kernels.integrations.forms import NORMS, RMS_NORMS, Form, fingerprint, forward_of
from triton_kernels.integrations.layers import FusedAttention, FusedRMSNorm, stand_in, widths

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
        for norm in (own.get_submodule(name) for name in NORMS if form.normed):
            if fingerprint(forward_of(norm)) in RMS_NORMS:
                stand_in(norm, FusedRMSNorm)
        result = own.forward(**call)
        if form.weighed:
            (expected, _), (result, _) = expected, result
        return float((result - expected).norm() / expected.norm())


def _small_twin(attention: nn.Module, form: Form, generator: torch.Generator) -> nn.Module:
    """A module of the same class and settings, with small layers in fp32 and nobody's hooks."""
    twin = _bare_twin(attention)
    twin.config = types.SimpleNamespace(_attn_implementation="eager")
    columns = widths(attention, form)
    layers = {form.output: (columns[0], _CHANNELS)}
    columns = [sum(columns)] if len(form.inputs) == 1 else columns
    inputs = {name: (_CHANNELS, width) for name, width in zip(form.inputs, columns, strict=True)}
    for name, sizes in (inputs | layers).items():
        layer = nn.Linear(*sizes, bias=False, device="meta")  # draws nothing
        weight = _normal(layer.weight.shape, generator) * sizes[0] ** -0.5
        layer.weight = nn.Parameter(weight, requires_grad=False)
        twin.add_module(name, layer)
    for name in NORMS if form.normed else ():
        norm = _bare_twin(attention.get_submodule(name))
        weight = 1 + 0.3 * _normal((attention.head_dim,), generator)
        norm.weight = nn.Parameter(weight, requires_grad=False)
        twin.add_module(name, norm)
    return twin


def _bare_twin(module: nn.Module) -> nn.Module:
    """A module of the same class and settings that holds nothing."""
    twin = object.__new__(type(module))  # what a sharded class makes is of another one
    nn.Module.__init__(twin)
    settings = vars(module).items()
    vars(twin).update((name, value) for name, value in settings if name not in vars(twin))
    return twin.eval()


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
