"""Small Hugging Face vision towers of every model whose attention ours takes, or refuses.

As far as the installed transformers has them; the models of hugging_face.py are not among them.
"""

import importlib
import inspect
from typing import Any, NamedTuple

import pytest
import torch

from tests.integrations.hugging_face import DEVICE, tensors_of, with_telling_weights

_QWEN2_5 = {
    "depth": 3,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 84,
    "out_hidden_size": 48,
    "fullatt_block_indexes": [1],
}
_QWEN3 = {
    "depth": 3,
    "hidden_size": 144,
    "num_heads": 2,
    "intermediate_size": 164,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
}
_DEEPSTACK = _QWEN3 | {"deepstack_visual_indexes": [0, 2]}
_GLM = {
    "depth": 2,
    "hidden_size": 128,
    "num_heads": 2,
    "intermediate_size": 96,
    "out_hidden_size": 48,
    "image_size": 84,
}
_ERNIE_SIZES = {"depth": 2, "hidden_size": 160, "num_heads": 2, "intermediate_size": 84}
_SIGLIP = {
    "num_hidden_layers": 2,
    "hidden_size": 144,
    "num_attention_heads": 2,
    "intermediate_size": 84,
    "patch_size": 14,
}
_KIMI = _SIGLIP | {"pos_emb_height": 6, "pos_emb_width": 6}
_PADDLE = _SIGLIP | {"image_size": 84}
_MUSE = _KIMI | {"layer_types": ["window_attention", "full_attention"]}


_DOTS = _SIGLIP | {"mlp_layer_types": ["dense"] * 2, "adapter_in_dim": 144}
_LFM = _SIGLIP | {"num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}

_OF_NUMBERS, _OF_PIXELS = "(tokens, numbers)", "(tokens, 3, side, side)"


class Family(NamedTuple):
    """A model's vision tower.

    Attributes:
        tower: its class.
        sizes: what its configuration is made with, head dims 64 to 80.
        patches: how it takes them.
        frames: of a patch.
        clips: whether it takes them; else its model hands it their frames.
    """

    tower: str
    sizes: dict[str, Any]
    patches: str = _OF_NUMBERS
    frames: int = 2
    clips: bool = True


_ERNIE = "Ernie4_5_VLMoeVisionTransformerPretrainedModel"
TAKEN = {
    "cohere_compass": Family("CohereCompassVisionModel", _DEEPSTACK),
    "dots3_note": Family("Dots3NoteVisionModel", _DOTS, frames=1),
    "ernie4_5_vl_moe": Family(_ERNIE, _ERNIE_SIZES, frames=1),
    "exaone4_5": Family("Exaone4_5_VisionModel", _QWEN2_5 | {"num_key_value_heads": 2}),
    "glm4v": Family("Glm4vVisionModel", _GLM, clips=False),
    "glm4v_moe": Family("Glm4vMoeVisionModel", _GLM, clips=False),
    "glm5_next": Family("Glm5NextVisionModel", _GLM, clips=False),
    "glm_ocr": Family("GlmOcrVisionModel", _GLM, clips=False),
    "kimi_k25": Family("Kimi_K25VisionModel", _KIMI, _OF_PIXELS, frames=1),
    "lfm3_vl": Family("Lfm3VlVisionModel", _LFM),
    "muse_glimmer": Family("MuseGlimmerVisionModel", _MUSE),
    "muse_spark": Family("MuseSparkVisionModel", _MUSE),
    "paddleocr_vl": Family("PaddleOCRVisionModel", _PADDLE, f"1, {_OF_PIXELS}", frames=1),
    "qwen2_5_omni": Family("Qwen2_5OmniVisionEncoder", _QWEN2_5),
    "qwen3_5": Family("Qwen3_5VisionModel", _QWEN3),
    "qwen3_5_moe": Family("Qwen3_5MoeVisionModel", _QWEN3),
    "qwen3_omni_moe": Family("Qwen3OmniMoeVisionEncoder", _DEEPSTACK),
    "qwen4_exp": Family("Qwen4ExpVisionModel", _QWEN3),
    "video_llama_3": Family("VideoLlama3VisionModel", _SIGLIP, frames=1),
}
# One of each form that hugging_face.py's are not of.
OF_EACH_FORM = ("exaone4_5", "glm_ocr", "kimi_k25", "lfm3_vl", "paddleocr_vl", "qwen2_5_omni")

_CODE = RuntimeError, r"must be an attention whose code ours is known to agree with, got a \w+ of "
# Each with the error and what it says.
REFUSED = {
    "inkling2": (Family("Inkling2VisionModel", _SIGLIP), *_CODE),
    "minimax_m3_vl": (Family("MiniMaxM3VLVisionModel", _SIGLIP), *_CODE),
}


def make(model):
    """A tower in fp32 for inference on DEVICE."""
    family = TAKEN[model] if model in TAKEN else REFUSED[model][0]
    try:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    except ImportError:
        pytest.skip(f"this transformers has no {model}")
    older = family.tower.replace("VLMoe", "VL_Moe")  # so Ernie's is written in transformers 5.0
    tower = getattr(module, family.tower if hasattr(module, family.tower) else older)
    return with_telling_weights(tower(tower.config_class(**family.sizes))).eval().to(DEVICE)


def random_call(model, tower, grid):
    """A call's patches, and its further arguments by name."""
    family, config = TAKEN[model], tower.config
    if not family.clips:
        grid = [(1, h, w) for t, h, w in grid for _ in range(t)]
    if model == "kimi_k25":  # transformers 5.17 takes clips of one length alone
        grid = [(max(t for t, _, _ in grid), h, w) for _, h, w in grid]
    grid_thw = torch.tensor(grid, device=DEVICE)
    side = config.patch_size
    pixels = (3, side, side)
    shape = (family.frames * 3 * side * side,) if family.patches == _OF_NUMBERS else pixels
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(int(grid_thw.prod(1).sum()), *shape, generator=generator).to(DEVICE)
    if model == "paddleocr_vl":
        patches = patches[None]
    further = {"grid_thw": grid_thw}
    if "cu_seqlens" in inspect.signature(tower.forward).parameters:  # PaddleOCR's in 5.0
        lengths = grid_thw[:, 1:].prod(1).repeat_interleave(grid_thw[:, 0])
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        further = {"image_grid_thw": grid_thw, "cu_seqlens": cu_seqlens}
    if model == "video_llama_3":
        further["merge_sizes"] = torch.tensor([1, 2] * len(grid), device=DEVICE)[: len(grid)]
    return patches, further


def run(tower, call):
    """What every attention returns, then what the tower does; all tensors."""
    results = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: results.append(output))
        for module in tower.modules()
        if type(module).__name__.endswith("Attention")
    ]
    try:
        results.append(tower(call[0], **call[1]))
    finally:
        for hook in hooks:
            hook.remove()
    return tensors_of(results)
