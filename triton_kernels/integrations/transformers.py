"""One line for Hugging Face users: `accelerate(model)` puts the fused attention into their model.

For every vision tower of transformers 4.57 and 5 that has this attention, known by its code:
families.md beside this file names the models.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import nn

from triton_kernels.checks import MAX_TILED_HEAD_DIM
from triton_kernels.integrations.forms import (
    ATTENTIONS,
    GATED_MLPS,
    LAYERS,
    MLPS,
    NORMS,
    RMS_NORMS,
    Form,
    fingerprint,
    foreign_home,
    forward_of,
)
from triton_kernels.integrations.gelu import ActivatedMLP
from triton_kernels.integrations.layer_norm import has_rows
from triton_kernels.integrations.layers import (
    ExactFrequencies,
    FusedAttention,
    FusedLayerNorm,
    FusedRMSNorm,
    PatchProduct,
    StandIn,
    put_back,
    stand_in,
)
from triton_kernels.integrations.mlp import AlignedMLP
from triton_kernels.integrations.plan import longest_window, model_of, plan_call
from triton_kernels.integrations.replay import Recordings, ReplayedTower
from triton_kernels.integrations.spot_check import deviation

try:
    import transformers
    from transformers import PreTrainedModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise ImportError(
        f"triton_kernels.integrations.transformers needs transformers 4.57 or newer ({error}): "
        "pip install '.[transformers]' in the clone"
    ) from error

__all__ = ["accelerate", "accelerated", "restore"]

_HOOK = "_fused_rope_attention_hook"
# The rule for bf16, of all dtypes the widest: PyTorch may be told to make fp32 products like that.
_TOLERANCE = 4e-3

# By what a layer's forward says, what stands in for it.
_ROLES = {
    **dict.fromkeys(RMS_NORMS, FusedRMSNorm),
    **dict.fromkeys(GATED_MLPS, AlignedMLP),
    **dict.fromkeys(MLPS, ActivatedMLP),
}

Model = TypeVar("Model", bound=nn.Module)


def accelerate(model: Model, *, cuda_graphs: bool = True) -> Model:
    """Run a model's vision tower on the fused attention kernel.

    The attention of every layer becomes `fused_rope_attention`, but for dropout in training; an MLP
    whose width shuts out the fast matrix kernels computes at an aligned width (3420 as 3456 in 16
    bits), which changes no result; RMSNorm becomes PyTorch's; where no gradients are recorded,
    LayerNorm becomes another kernel, and a tanh GELU part of the product before it; a convolution
    over single patches becomes a product; rotary frequencies that are cast along with the model are
    computed in fp32 all the same; and what depends on the image sizes alone is worked out once per
    size, not on every call. With transformers 5 a size that has come three times among the last
    eight is recorded as a CUDA graph, and replayed in one launch.

    An attention is known by what its code says, not by its name: the forward, and the functions of
    its file that it calls, have to read like one that was tested; the layer has to hold nothing but
    the projections of that form; and in a small random call, on the CPU, ours has to agree with it.
    Norms, MLPs and rotary embeddings are taken likewise, and else left as they are.

    Modules, parameters and buffers remain the objects that they are, unchanged in shape, storage
    and class: all else is derived from them in each call. So optimizers, adapters, sharding,
    offloading and CUDA graphs may come before or after, but for libraries that give layers a
    forward of their own: accelerate before these. A norm, MLP or rotary embedding that runs another
    library's code is left as it is, and so are layers within an MLP (adapters, quantised ones),
    which are called. Run a backward pass on the same side of the change as its forward pass.
    Attention on a CPU runs through the reference.

    Args:
        model: a Hugging Face model named in families.md, with or without its head, or one built
            around its vision tower, or the tower; bf16, fp16 or fp32, in training or not. One that
            is accelerated already stays as it is.
        cuda_graphs: whether calls may be replayed: those in 16 bits, of up to 8192 patches, outside
            of training, autocast, compilers and profilers, where no layer has a hook. A recording
            is dropped when the tower changes in anything but its parameters' values. All of a tower
            keep the memory of the largest one's call, and of each one's results.

    Returns:
        `model` itself.

    Raises:
        TypeError: no vision attention over segments in it.
        ValueError: a tower, block or attention that runs another library's code; an attention with
            further layers, with fewer key than query heads where its code tells of none, or of a
            head_dim that the kernel does not take; or one that gives something else than ours.
        RuntimeError: an attention whose code is not known.

    After an error the model is as it was.
    """
    _accelerate(_find_towers(model), cuda_graphs)
    return model


def restore(model: Model) -> Model:
    """Undo `accelerate`: classes and hooks are what they were.

    Args:
        model: as for `accelerate`; one that is not accelerated stays as it is.

    Returns:
        `model` itself.

    Raises:
        TypeError: no vision attention over segments in it.
        ValueError: another library has changed a layer since (sharded or offloaded it, say),
            which has to be undone first; nothing is changed.
    """
    _restore(_find_towers(model))
    return model


@contextlib.contextmanager
def accelerated(model: Model, *, cuda_graphs: bool = True) -> Iterator[Model]:
    """`accelerate` within a with statement, undone at its end unless the model came accelerated.

    Args and errors are those of `accelerate`, and at the end those of `restore`.
    """
    changed = _accelerate(_find_towers(model), cuda_graphs)
    try:
        yield model
    finally:
        _restore(changed)


def _find_towers(model: nn.Module) -> list[nn.Module]:
    """The innermost of the model's models that have vision attention."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    towers = [m for m in modules if isinstance(m, PreTrainedModel) and _attentions(m)]
    outer = {id(m) for m in towers for inner in towers if inner is not m and inner in m.modules()}
    towers = [tower for tower in towers if id(tower) not in outer]
    if not towers:
        raise TypeError(
            "model must be a Hugging Face model with the vision attention of Qwen-VL, GLM-V or the "
            f"like, or its vision tower, got {type(model).__name__}, which holds no attention that "
            "takes cu_seqlens and position_embeddings"
        )
    return towers


def _attentions(tower: nn.Module) -> list[tuple[str, nn.Module]]:
    """The innermost modules that take segments and angles, by name."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in tower.named_modules():
        if takes_segments(type(module).forward):
            if found and (not found[-1][0] or name.startswith(f"{found[-1][0]}.")):
                found.pop()  # a block, which hands them on
            found.append((name, module))
    return found


@functools.cache
def takes_segments(forward: Callable) -> bool:
    """Whether a forward is one of an attention over segments, or hands on what that takes."""
    try:
        parameters = inspect.signature(forward).parameters.keys()
    except (TypeError, ValueError):  # of what is not written in Python
        return False
    angles = {"position_embeddings", "rotary_pos_emb"}
    return "cu_seqlens" in parameters and not angles.isdisjoint(parameters)


def _accelerate(towers: list[nn.Module], cuda_graphs: bool) -> list[nn.Module]:
    """Check all towers, then change those that are not accelerated; return these."""
    towers = [tower for tower in towers if not hasattr(tower, _HOOK)]
    forms = [_check(tower) for tower in towers]
    try:
        for tower, its_forms in zip(towers, forms, strict=True):
            _change(tower, its_forms, cuda_graphs)
    except BaseException:  # an interrupt, for instance
        _restore(towers)
        raise
    return towers


def _change(tower: nn.Module, forms: dict[nn.Module, Form], cuda_graphs: bool) -> None:
    for index, (attention, form) in enumerate(forms.items()):
        stand_in(attention, FusedAttention)
        attention.form = form
        window = longest_window(tower, index)
        if window is not None:
            attention.longest_window = window
    for module in list(tower.modules()):
        role = _role(module)
        if role is not None:
            stand_in(module, role)
    if cuda_graphs:
        stand_in(tower, ReplayedTower)
        tower.recordings = Recordings()
    setattr(tower, _HOOK, tower.register_forward_pre_hook(plan_call, with_kwargs=True))


def _role(module: nn.Module) -> type[StandIn] | None:
    """What stands in for a layer beside the attention; None for one that is left as it is."""
    forward = forward_of(module)
    if isinstance(module, StandIn) or "forward" in vars(module):
        return None
    if PatchProduct.fits(module):
        return PatchProduct
    if has_rows(module):
        return FusedLayerNorm
    if model_of(type(module)) is None or foreign_home(forward) is not None:
        return None
    if ExactFrequencies.fits(module):
        return ExactFrequencies
    return _ROLES.get(fingerprint(forward))


def _restore(towers: list[nn.Module]) -> None:
    """Check all towers, then change back those that are accelerated."""
    for tower in towers:
        for name, module in _stand_ins(tower):
            if not module.is_intact():
                raise ValueError(
                    f"{name or 'the tower'} must be as accelerate left it, got a "
                    f"{type(module).__name__} that another library has changed: undo that before"
                )
    for tower in towers:
        for _, module in _stand_ins(tower):
            put_back(module)
        if hasattr(tower, _HOOK):
            getattr(tower, _HOOK).remove()
            delattr(tower, _HOOK)


def _stand_ins(tower: nn.Module) -> list[tuple[str, StandIn]]:
    return [(n, m) for n, m in tower.named_modules() if isinstance(m, StandIn)]


def _check(tower: nn.Module) -> dict[nn.Module, Form]:
    """The form of each attention, if all may run ours."""
    _check_own("the tower", tower)
    forms, agreed = {}, set()
    for name, attention in _attentions(tower):
        path = name.split(".")
        for outer in (".".join(path[:end]) for end in range(1, len(path))):
            _check_own(outer, tower.get_submodule(outer))
        _check_own(name, attention)
        forms[attention] = form = _check_attention(name, attention)
        if (settings := _settings(attention)) not in agreed:
            _check_agreement(name, attention, form)
            agreed.add(settings)
    return forms


def _check_own(name: str, module: nn.Module) -> None:
    home = foreign_home(forward_of(module))
    if home is not None:
        raise ValueError(
            f"{name} must run transformers' own code, got a {type(module).__name__} with code of "
            f"{home}, which ours may not fit: accelerate the model without it"
        )


def _check_attention(name: str, attention: nn.Module) -> Form:
    if "forward" in vars(attention):
        raise ValueError(
            f"{name} has a forward of its own, put there by another library (a device_map over "
            "several devices has it done), that would hide ours: accelerate the model before"
        )
    form = ATTENTIONS.get(fingerprint(type(attention).forward))
    layers = LAYERS if form is None else set(form.layers)
    held = dict(attention.named_children())
    further = [layer for layer in held if layer not in layers]
    norms = " and norms" if layers.issuperset(NORMS) else ""
    if further and not layers.isdisjoint(held):
        raise ValueError(
            f"{name} must hold nothing but projections{norms}, got {', '.join(further)} in a "
            f"{type(attention).__name__}, which ours does not compute"
        )
    grouped = form is not None and form.grouped
    if not grouped and getattr(attention, "num_key_value_groups", 1) != 1:
        raise ValueError(
            f"{name} must have a key head for each query head, got a {type(attention).__name__} "
            f"with one for {attention.num_key_value_groups}, which ours does not compute"
        )
    if form is None:
        raise RuntimeError(
            f"{name} must be an attention whose code ours is known to agree with, got a "
            f"{type(attention).__name__} of transformers {transformers.__version__} with other code"
        )
    if attention.head_dim % 8 or not 8 <= attention.head_dim <= MAX_TILED_HEAD_DIM:
        raise ValueError(
            f"head_dim must be a multiple of 8 up to {MAX_TILED_HEAD_DIM}, "
            f"got {attention.head_dim} in {name}"
        )
    implementation = attention.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get(implementation)  # None: the model's own, "eager"
    home = None if function is None else foreign_home(function)
    if home is not None:
        raise ValueError(
            f"{name} must use an attention function of transformers', got {implementation!r} with "
            f"code of {home}, which ours would replace"
        )
    return form


def _settings(attention: nn.Module) -> tuple:
    """What a small call depends on."""
    values = ((n, v) for n, v in vars(attention).items() if isinstance(v, (int, float, str)))
    return type(attention), *sorted(values)


def _check_agreement(name: str, attention: nn.Module, form: Form) -> None:
    error = deviation(attention, form)
    if not error <= _TOLERANCE:
        raise ValueError(
            f"{name} must give what ours gives, got a {type(attention).__name__} whose results "
            f"differ by {error:.1e} in a small random call"
        )
