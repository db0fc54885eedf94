"""One line for Hugging Face users: `accelerate(model)` puts the fused attention into their model.

For the vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, also with a mixture of experts, in
transformers 4.57 and 5.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from triton_kernels.checks import MAX_HEAD_DIM
from triton_kernels.integrations.layers import (
    ExactFrequencies,
    FusedAttention,
    FusedRMSNorm,
    PaddedLinear,
    StandIn,
    aligned_width,
    holds_plain_parameters,
    put_back,
    stand_in,
)
from triton_kernels.integrations.plan import Geometry, plan_call

try:
    import transformers
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
    )
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel
except ImportError as error:
    raise ImportError(
        f"triton_kernels.integrations.transformers needs transformers 4.57 or newer ({error}): "
        "pip install '.[transformers]' in the clone"
    ) from error

__all__ = ["accelerate", "accelerated", "restore"]

TOWERS = (
    Qwen2VisionTransformerPretrainedModel,
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen3VLVisionModel,
    Qwen3VLMoeVisionModel,
)
# Of the attention's arguments: what ours needs, and what it knows and can do without.
_NEEDED = {"hidden_states", "cu_seqlens", "position_embeddings"}
_KNOWN = _NEEDED | {"rotary_pos_emb", "max_seqlen"}
_HOOK = "_fused_rope_attention_hook"

Model = TypeVar("Model", bound=nn.Module)


def accelerate(model: Model) -> Model:
    """Run a model's vision tower on the fused attention kernel.

    The attention of every layer becomes `fused_rope_attention_qkvpacked`; an MLP whose width shuts
    out the fast matrix kernels is stored wider, filled up with zeros (3420 as 3456), which changes
    no result; RMSNorm becomes PyTorch's; rotary frequencies that were cast along with the model are
    put right; and what depends on the image sizes alone is worked out once per size, not on every
    call. Modules and parameters remain the objects that they are.

    `state_dict`, `load_state_dict` and `save_pretrained` keep the published shapes (in a state dict
    as views, which `safetensors.torch.save_file` wants made contiguous first). The padded
    parameters themselves are wider, so accelerate before making an optimizer of them or wrapping
    the model for several processes, and run a backward pass on the same side of the change as its
    forward pass. Adapters (LoRA) on the padded layers, Qwen2.5-VL's MLP, would miss that width.
    Attention on a CPU and its backward pass anywhere run through the reference.

    Args:
        model: a Hugging Face Qwen2-VL, Qwen2.5-VL or Qwen3-VL model, with or without its head, or
            its vision tower; bf16, fp16 or fp32, in training or not. One that is accelerated
            already stays as it is. Casting it afterwards rounds the rotary frequencies too.

    Returns:
        `model` itself.

    Raises:
        TypeError: no vision tower of these families in it, or a layer that has to be padded and
            can't be, because it is quantised, sharded or reparametrised.
        ValueError: a layer whose weights are sharded or not in memory, or that another library has
            given a forward of its own, or a head_dim that the kernel does not take.
        RuntimeError: a transformers version whose attention has another signature.

    After an error the model is as it was.
    """
    _accelerate(_find_towers(model))
    return model


def restore(model: Model) -> Model:
    """Undo `accelerate`: classes, shapes, bits and hooks are what they were.

    Args:
        model: as for `accelerate`; one that is not accelerated stays as it is.

    Returns:
        `model` itself.

    Raises:
        TypeError: no vision tower of these families in it.
        ValueError: another library has changed a layer since (parametrised, pruned or sharded it,
            for instance), which has to be undone first; nothing is changed.
    """
    _restore(_find_towers(model))
    return model


@contextlib.contextmanager
def accelerated(model: Model) -> Iterator[Model]:
    """`accelerate` within a with statement, undone at its end unless the model came accelerated.

    Args and errors are those of `accelerate`, and at the end those of `restore`.
    """
    changed = _accelerate(_find_towers(model))
    try:
        yield model
    finally:
        _restore(changed)


def _find_towers(model: nn.Module) -> list[nn.Module]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    towers = [module for module in modules if isinstance(module, TOWERS)]
    if not towers:
        raise TypeError(
            "model must be a Hugging Face Qwen2-VL, Qwen2.5-VL or Qwen3-VL model or its vision "
            f"tower, got {type(model).__name__}, which holds no {_names(TOWERS)}"
        )
    return towers


def _accelerate(towers: list[nn.Module]) -> list[nn.Module]:
    """Check all towers, then change those that are not accelerated; return these."""
    towers = [tower for tower in towers if not hasattr(tower, _HOOK)]
    for tower in towers:
        _check(tower)
    try:
        for tower in towers:
            _change(tower)
    except BaseException:  # no memory left for the padding, for instance
        _restore(towers)
        raise
    return towers


def _change(tower: nn.Module) -> None:
    window = Geometry.of(tower).longest_window
    for index, block in enumerate(tower.blocks):
        stand_in(block.attn, FusedAttention)
        if window is not None and index not in tower.fullatt_block_indexes:
            block.attn.longest_window = window
    for _, norm in _rms_norms(tower):
        stand_in(norm, FusedRMSNorm)
    if tower.rotary_pos_emb.inv_freq.dtype != torch.float32:
        stand_in(tower.rotary_pos_emb, ExactFrequencies)
    for _, linear in _misaligned(tower):
        stand_in(linear, PaddedLinear)
    setattr(tower, _HOOK, tower.register_forward_pre_hook(plan_call, with_kwargs=True))


def _restore(towers: list[nn.Module]) -> None:
    """Check all towers, then change back those that are accelerated."""
    for tower in towers:
        for name, module in _stand_ins(tower):
            if not module.is_intact():
                raise ValueError(
                    f"{name} must be as accelerate left it, got a {type(module).__name__} that "
                    "another library has changed: undo that before"
                )
    for tower in towers:
        for _, module in _stand_ins(tower):
            put_back(module)
        if hasattr(tower, _HOOK):
            getattr(tower, _HOOK).remove()
            delattr(tower, _HOOK)


def _stand_ins(tower: nn.Module) -> list[tuple[str, StandIn]]:
    return [(n, m) for n, m in tower.named_modules() if isinstance(m, StandIn)]


def _rms_norms(tower: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in tower.named_modules() if hasattr(m, "variance_epsilon")]


def _misaligned(tower: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of the gated MLPs whose width has to be padded: gate and up, then down."""
    return [
        (f"blocks.{index}.mlp.{name}", getattr(block.mlp, name))
        for index, block in enumerate(tower.blocks)
        if hasattr(block.mlp, "gate_proj")
        and aligned_width(block.mlp.intermediate_size) != block.mlp.intermediate_size
        for name in ("gate_proj", "up_proj", "down_proj")
    ]


def _check(tower: nn.Module) -> None:
    attentions = [(f"blocks.{i}.attn", block.attn) for i, block in enumerate(tower.blocks)]
    for attention in {type(attention) for _, attention in attentions}:
        _check_signature(attention)
    for name, attention in attentions:
        if attention.head_dim % 8 or not 8 <= attention.head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, got {attention.head_dim} "
                f"in {name}"
            )
    misaligned = _misaligned(tower)
    for name, linear in misaligned:
        if type(linear) is not nn.Linear or not holds_plain_parameters(linear):
            kind = type(getattr(linear, "weight", None)).__name__
            raise TypeError(
                f"{name} has to be padded, for which it must be a torch.nn.Linear that is neither "
                "quantised, sharded nor reparametrised (pruned, for instance), "
                f"got {type(linear).__name__} with a weight of type {kind}"
            )
    for name, module in [*attentions, *_rms_norms(tower), *misaligned]:
        _check_unhooked(name, module)


def _check_signature(attention: type[nn.Module]) -> None:
    parameters = inspect.signature(attention.forward).parameters.values()
    further = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
    named = {p.name for p in parameters} - {"self", *further}
    if not further or not _NEEDED <= named <= _KNOWN:
        raise RuntimeError(
            f"{attention.__name__}.forward of transformers {transformers.__version__} must take "
            f"{', '.join(sorted(_NEEDED))}, at most {', '.join(sorted(_KNOWN - _NEEDED))} beside "
            f"them, and further keywords, got {inspect.signature(attention.forward)}"
        )


def _check_unhooked(name: str, module: nn.Module) -> None:
    if "forward" in vars(module):
        raise ValueError(
            f"{name} has a forward of its own, put there by another library (a device_map over "
            "several devices has it done), that would hide ours: accelerate the model before"
        )
    for parameter in module.parameters():
        if parameter.is_meta or hasattr(parameter, "device_mesh"):
            kind = "on the meta device (offloaded?)" if parameter.is_meta else "sharded"
            raise ValueError(f"{name} must hold its weights whole and in memory, got them {kind}")


def _names(classes: tuple[type, ...]) -> str:
    return " or ".join(cls.__name__ for cls in classes)
