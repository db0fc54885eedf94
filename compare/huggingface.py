"""Hugging Face's tower: the checkpoint, the fp32 reference, the bf16 yardstick and two peers."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from compare.arrays import torch_device
from compare.errors import UnavailableError
from compare.peers_torch import load_varlen
from flax_models import VisionConfig

# Weights are drawn so that errors show. As Hugging Face initialises it the tower has zero biases,
# unit norms and nearly uniform attention: dropping a bias or rotating wrongly would go unseen.
_QK_GAIN = 1.5
_RESIDUAL_GAIN = 0.5  # of the products that end in the residual stream, which grows slowly then
_VECTOR_STD = 0.2

_SHARD = "500MB"  # several files, as real checkpoints come


def random_checkpoint(directory: str | os.PathLike[str], config: VisionConfig) -> None:
    """Write a tower with random bf16 weights by Hugging Face's own save_pretrained, in shards.

    Args:
        directory: where to; made if missing.
        config: the tower's sizes.
    """
    classes = _classes()
    sizes = classes.config(
        depth=config.depth,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
        out_hidden_size=config.out_hidden_size,
        fullatt_block_indexes=list(config.fullatt_block_indexes),
        window_size=config.window_size,
    )
    device = torch_device()
    with device:
        model = classes.model(sizes)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator, device=device)
            parameter.copy_(_scaled(name, draw))
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size=_SHARD)


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
    model = _classes().model.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    if attention != "SDPA":
        # The tower asks for "flash" in the name to hand over cu_seqlens. Set after loading, since
        # loading would look for the flash_attn package.
        name = f"varlen_flash_{attention.lower()}"
        _register(name, varlen)
        model.config._attn_implementation = name
    return model.eval().to(torch_device())


def encode(model: torch.nn.Module, pixel_values: Any, grid_thw: Any) -> torch.Tensor:
    """Embeddings [tokens / 4, out_hidden_size] of patches [tokens, 1176] and grid [images, 3]."""
    with torch.inference_mode():
        result = model(pixel_values, grid_thw)
    # transformers 4 returns the embeddings alone.
    return result if isinstance(result, torch.Tensor) else result.pooler_output


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


class _Classes(NamedTuple):
    config: Any
    model: Any


def _classes() -> _Classes:
    try:
        from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl, modeling_qwen2_5_vl
        from transformers.utils import logging
    except ImportError as error:
        raise UnavailableError(
            f"transformers with Qwen2.5-VL is not installed ({error}): "
            "pip install 'fused-rope-attention[compare]'"
        ) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return _Classes(
        configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig,
        modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel,
    )


def _scaled(name: str, draw: torch.Tensor) -> torch.Tensor:
    if name.endswith("bias"):
        return _VECTOR_STD * draw
    if draw.ndim == 1:
        return 1 + _VECTOR_STD * draw
    weight = draw * draw[0].numel() ** -0.5
    if name.endswith("attn.qkv.weight"):
        weight[: len(weight) * 2 // 3] *= _QK_GAIN
    if name.endswith(("attn.proj.weight", "down_proj.weight")):
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
