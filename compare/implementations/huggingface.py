"""Hugging Face's tower: the checkpoint, the fp32 reference, the bf16 baseline and two peers."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from compare.common.errors import UnavailableError
from compare.torch_tower.varlen import load_varlen
from compare.workloads.arrays import torch_device
from flax_models import ImageConfig, VisionConfig
from flax_models.common.image_config import IMAGE_PROCESSOR_FILE

# Weights are drawn so that errors show. As Hugging Face initialises it the tower has zero biases,
# unit norms and nearly uniform attention: dropping a bias or rotating wrongly would go unseen.
_QK_GAIN = 1.5
_RESIDUAL_GAIN = 0.5  # of the products that end in the residual stream, which grows slowly then
_INTO_RESIDUAL = (
    "attn.proj.weight",
    "mlp.down_proj.weight",
    "mlp.fc2.weight",
    "mlp.linear_fc2.weight",
)
_VECTOR_STD = 0.2
_POSITION_STD = 0.5  # about as large as the embedded patches that it is added to

_CLASS_NAMES = {
    "qwen2_vl": ("Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen2_5_omni": ("Qwen2_5OmniVisionEncoderConfig", "Qwen2_5OmniVisionEncoder"),
    "qwen3_vl": ("Qwen3VLVisionConfig", "Qwen3VLVisionModel"),
    "qwen3_omni_moe": ("Qwen3OmniMoeVisionEncoderConfig", "Qwen3OmniMoeVisionEncoder"),
    "qwen3_5": ("Qwen3_5VisionConfig", "Qwen3_5VisionModel"),
}

_SHARD = "500MB"  # several files, as real checkpoints come


def random_checkpoint(directory: str | os.PathLike[str], config: VisionConfig) -> None:
    """Write a tower with random bf16 weights by Hugging Face's own save_pretrained, in shards.

    Beside it lie the settings of the family's image processor.
    """
    classes = vision_classes(config.model_type)
    sizes = classes.config(**_values(config))
    device = torch_device()
    with device:
        model = classes.model(sizes)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator, device=device)
            parameter.copy_(_scaled(name, draw))
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size=_SHARD)
    _write_image_settings(directory, ImageConfig.of(config))


def _write_image_settings(directory: str | os.PathLike[str], images: ImageConfig) -> None:
    """Those of the family's processor: transformers makes none of a tower alone."""
    values = asdict(images)
    limits = {"shortest_edge": values.pop("min_pixels"), "longest_edge": values.pop("max_pixels")}
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "size": limits, **values}
    Path(directory, IMAGE_PROCESSOR_FILE).write_text(json.dumps(settings), encoding="utf-8")


def load(
    directory: str | os.PathLike[str], dtype: torch.dtype, attention: str = "SDPA"
) -> torch.nn.Module:
    """Hugging Face's tower on the GPU if there is one.

    Args:
        directory: of the checkpoint.
        dtype: of the weights; the angles stay fp32, as they do only when loaded this way.
        attention: "SDPA", or "FA2" or "FA3" for all windows in one varlen call.

    Raises:
        UnavailableError: the attention is not installed.
    """
    if attention != "SDPA":
        varlen = load_varlen(attention)
    classes = vision_classes(VisionConfig.from_pretrained(directory).model_type)
    model = classes.model.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    if attention != "SDPA":
        # The tower asks for "flash" in the name to hand over cu_seqlens. Set after loading, since
        # loading would look for the flash_attn package.
        name = f"varlen_flash_{attention.lower()}"
        _register(name, varlen)
        model.config._attn_implementation = name
    return model.eval().to(torch_device())


def encode(model: torch.nn.Module, pixel_values: Any, grid_thw: Any) -> Any:
    """Embeddings [tokens / 4, out_hidden_size] of patches [tokens, patch_dim] and grid [images, 3].

    From a tower with DeepStack (embeddings, features), features a tuple as our towers return it.
    """
    with torch.inference_mode():
        return call(model, pixel_values, grid_thw)


def call(model: torch.nn.Module, pixel_values: Any, grid_thw: Any) -> Any:
    """As `encode`, but for whatever gradients are asked for."""
    result = model(pixel_values, grid_thw)
    if isinstance(result, torch.Tensor):  # transformers 4, without DeepStack
        return result
    if isinstance(result, tuple):  # transformers 4
        embeddings, features = result
    else:
        embeddings = result.pooler_output
        features = getattr(result, "deepstack_features", None)
    return (embeddings, tuple(features)) if features else embeddings


def hidden_states(model: torch.nn.Module, pixel_values: Any, grid_thw: Any) -> list[torch.Tensor]:
    """The state after every block, [tokens, hidden_size] each, in window order."""
    hidden: list[torch.Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
        for block in model.blocks
    ]
    try:
        encode(model, pixel_values, grid_thw)
    finally:
        for hook in hooks:
            hook.remove()
    return hidden


def pooled(model: torch.nn.Module, pixel_values: Any, grid_thw: Any) -> torch.Tensor:
    """Our towers' "pooled" [images, hidden_size]: means of what enters the merger.

    fp32, but rounded to the tower's dtype, as theirs are.
    """
    entering: list[torch.Tensor] = []
    hook = model.merger.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
    try:
        encode(model, pixel_values, grid_thw)
    finally:
        hook.remove()
    # In window order: an image's patches stay together.
    images = entering[0].split(grid_thw.prod(dim=1).tolist())
    return torch.stack([patches.mean(dim=0).float() for patches in images])


def image_processor(directory: str | os.PathLike[str]) -> Any:
    """The image processor that transformers makes of a checkpoint, images to tensors on the CPU."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(directory)


@contextlib.contextmanager
def true_fp32() -> Iterator[None]:
    """fp32 means fp32: no TF32 in products and convolutions, attention as plain products."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision
    matmul.fp32_precision = convolution.fp32_precision = "ieee"
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        matmul.fp32_precision, convolution.fp32_precision = before


class VisionClasses(NamedTuple):
    """A vision tower's classes in transformers."""

    config: Any
    model: Any


def vision_classes(model_type: str) -> VisionClasses:
    """The classes of a family's tower, by `VisionConfig.model_type`.

    Raises:
        UnavailableError: transformers is not installed, or too old for the family.
    """
    config, model = _CLASS_NAMES[model_type]
    package = f"transformers.models.{model_type}"
    try:
        from transformers.utils import logging

        found = VisionClasses(
            getattr(import_module(f"{package}.configuration_{model_type}"), config),
            getattr(import_module(f"{package}.modeling_{model_type}"), model),
        )
    except ImportError as error:
        raise UnavailableError(
            f"transformers with {model_type} is not installed ({error}): "
            "pip install '.[compare]' in the clone"
        ) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return found


def _values(config: VisionConfig) -> dict[str, Any]:
    """What Hugging Face's configuration of a tower takes."""
    keys = dict(config.family.config_keys)
    values = {}
    if keys.pop("mlp_ratio", None):
        values["mlp_ratio"] = config.intermediate_size // config.hidden_size
    if config.family.windows:
        values["window_size"] = config.window_size
        values["fullatt_block_indexes"] = list(config.fullatt_block_indexes)
    return values | {theirs: getattr(config, ours) for ours, theirs in keys.items()}


def _scaled(name: str, draw: torch.Tensor) -> torch.Tensor:
    if name.endswith("bias"):
        return _VECTOR_STD * draw
    if draw.ndim == 1:
        return 1 + _VECTOR_STD * draw
    if name == "pos_embed.weight":
        return _POSITION_STD * draw
    weight = draw * draw[0].numel() ** -0.5
    if name.endswith("attn.qkv.weight"):
        weight[: len(weight) * 2 // 3] *= _QK_GAIN
    if name.endswith(("attn.q.weight", "attn.k.weight")):
        weight *= _QK_GAIN
    if name.endswith(_INTO_RESIDUAL):
        weight *= _RESIDUAL_GAIN
    return weight


def _register(name: str, varlen: Any) -> None:
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        # It exists before, but gets no cu_seqlens unless its name is that of flash attention.
        raise UnavailableError(
            f"a varlen attention in Hugging Face's tower needs transformers 5, "
            f"found {transformers.__version__}"
        )

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kw: Any
    ) -> tuple[torch.Tensor, None]:
        # [1, heads, tokens, head_dim] -> [tokens, heads, head_dim]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return varlen(q, k, v, kw["cu_seq_lens_q"], kw["max_length_q"])[None], None

    transformers.AttentionInterface.register(name, attend)
