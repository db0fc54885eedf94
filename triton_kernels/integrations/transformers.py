"""One line for Hugging Face users: `accelerate(model)` puts the fused attention into their model.

For the vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, also with a mixture of experts, in
transformers 4.57 and 5.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from triton_kernels.checks import MAX_HEAD_DIM
from triton_kernels.integrations.layers import (
    ExactFrequencies,
    FusedAttention,
    FusedRMSNorm,
    StandIn,
    put_back,
    stand_in,
)
from triton_kernels.integrations.mlp import AlignedMLP
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
# Whose functions a tower and its blocks may run: the model's own, and those that only go on to it,
# compiled for instance, or when weights have been brought over.
_OWN = {"transformers", "torch", "accelerate"}

Model = TypeVar("Model", bound=nn.Module)


def accelerate(model: Model) -> Model:
    """Run a model's vision tower on the fused attention kernel.

    The attention of every layer becomes `fused_rope_attention_qkvpacked`; an MLP whose width shuts
    out the fast matrix kernels computes at an aligned width (3420 as 3456 in 16 bits), which
    changes no result; RMSNorm becomes PyTorch's; rotary frequencies that are cast along with the
    model are computed in fp32 all the same; and what depends on the image sizes alone is worked out
    once per size, not on every call.

    Modules, parameters and buffers remain the objects that they are, unchanged in shape, storage
    and class: all else is derived from them in each call. So optimizers, adapters, sharding,
    offloading and CUDA graphs may come before or after, but for libraries that give layers a
    forward of their own: accelerate before these. A norm, MLP or rotary embedding that runs another
    library's code is left as it is, and so are layers within an MLP (adapters, quantised ones),
    which are called. Run a backward pass on the same side of the change as its forward pass.
    Attention on a CPU and its backward pass anywhere run through the reference.

    Args:
        model: a Hugging Face Qwen2-VL, Qwen2.5-VL or Qwen3-VL model, with or without its head, or
            its vision tower; bf16, fp16 or fp32, in training or not. One that is accelerated
            already stays as it is.

    Returns:
        `model` itself.

    Raises:
        TypeError: no vision tower of these families in it.
        ValueError: a tower, block or attention that runs another library's code, or a head_dim that
            the kernel does not take.
        RuntimeError: a transformers version whose attention has another signature.

    After an error the model is as it was.
    """
    _accelerate(_find_towers(model))
    return model


def restore(model: Model) -> Model:
    """Undo `accelerate`: classes and hooks are what they were.

    Args:
        model: as for `accelerate`; one that is not accelerated stays as it is.

    Returns:
        `model` itself.

    Raises:
        TypeError: no vision tower of these families in it.
        ValueError: another library has changed a layer since (sharded or offloaded it, say),
            which has to be undone first; nothing is changed.
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
    except BaseException:  # an interrupt, for instance
        _restore(towers)
        raise
    return towers


def _change(tower: nn.Module) -> None:
    window = Geometry.of(tower).longest_window
    for index, block in enumerate(tower.blocks):
        attention = _inner(_inner(block).attn)
        stand_in(attention, FusedAttention)
        if window is not None and index not in tower.fullatt_block_indexes:
            attention.longest_window = window
    for module in list(tower.modules()):
        for kind, role in (
            ("RMSNorm", FusedRMSNorm),
            ("VisionRotaryEmbedding", ExactFrequencies),
            ("VLMLP", AlignedMLP),  # the gated one, Qwen2.5-VL's
        ):
            if _is_own(module, kind, tower) and "forward" not in vars(module):
                stand_in(module, role)
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


def _check(tower: nn.Module) -> None:
    _check_own("the tower", tower, "", tower)
    for index, block in enumerate(map(_inner, tower.blocks)):
        _check_own(f"blocks.{index}", block, "VisionBlock", tower)
        name, attention = f"blocks.{index}.attn", _inner(block.attn)
        _check_own(name, attention, "VisionAttention", tower)
        _check_signature(type(attention))
        if "forward" in vars(attention):
            raise ValueError(
                f"{name} has a forward of its own, put there by another library (a device_map over "
                "several devices has it done), that would hide ours: accelerate the model before"
            )
        if attention.head_dim % 8 or not 8 <= attention.head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, got {attention.head_dim} "
                f"in {name}"
            )


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


def _check_own(name: str, module: nn.Module, kind: str, tower: nn.Module) -> None:
    if not _is_own(module, kind, tower):
        home = _foreign_home(_forward_of(module)) or type(module).__module__
        raise ValueError(
            f"{name} must run transformers' own code, got a {type(module).__name__} with code of "
            f"{home}, which ours may not fit: accelerate the model without it"
        )


def _is_own(module: nn.Module, kind: str, tower: nn.Module) -> bool:
    """Whether a module runs a class of the tower's own file whose name ends like that, unpatched.

    It may be of a class derived from it, as FSDP gives modules, that adds no forward.
    """
    files = [cls.__module__ for cls in TOWERS if isinstance(tower, cls)]
    named = any(c.__module__ in files and c.__name__.endswith(kind) for c in type(module).__mro__)
    return named and _foreign_home(_forward_of(module)) is None


def _inner(module: nn.Module) -> nn.Module:
    """A module without what PyTorch puts around one: to compile it, shard it or keep less of it."""
    while type(module).__module__.startswith("torch.") and len(list(module.children())) == 1:
        (module,) = module.children()
    return module


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    return vars(module).get("forward", type(module).forward)


def _foreign_home(forward: Callable[..., Any]) -> str | None:
    """Where the first of a forward's functions, each wrapping the next, is from that is not _OWN.

    By where a function finds its globals: wrappers take on the names of what they wrap.
    """
    while forward is not None:
        function = getattr(forward, "func", forward)  # of a functools.partial
        function = getattr(function, "__func__", function)  # of a bound method
        home = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
        if home.partition(".")[0] not in _OWN:
            return home
        forward = getattr(forward, "__wrapped__", None)
    return None


def _names(classes: tuple[type, ...]) -> str:
    return " or ".join(cls.__name__ for cls in classes)
