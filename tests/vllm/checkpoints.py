"""Tiny checkpoints of the families, with random weights, as Hugging Face writes them."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
WORDS = 59
IDS = {
    name: SPECIAL.index(f"<|{token}|>")
    for name, token in {
        "image_token_id": "image_pad",
        "video_token_id": "video_pad",
        "vision_start_token_id": "vision_start",
        "vision_end_token_id": "vision_end",
        "bos_token_id": "endoftext",
        "eos_token_id": "endoftext",
    }.items()
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,  # vLLM's attention on a CPU takes no narrower heads
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": len(SPECIAL) + WORDS,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
}
VISION = {"depth": 3, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
# Heads of 80, 80 and 72 columns, as the published ones have.
FAMILIES = {
    "Qwen2VL": VISION | {"embed_dim": 160, "hidden_size": 64, "mlp_ratio": 2},
    "Qwen2_5_VL": VISION
    | {
        "hidden_size": 160,
        "intermediate_size": 60,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [2],
    },
    "Qwen3VL": VISION
    | {
        "hidden_size": 144,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [1],
    },
}

PUBLISHED_TEXT = TEXT | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
PUBLISHED_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
# Which vLLM renders a request by: it puts an image's own words where the message has it.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def save(family: str, folder: Path) -> torch.nn.Module:
    """Write a checkpoint with its processor; return Hugging Face's model."""
    config = getattr(transformers, f"{family}Config")(
        text_config=TEXT, vision_config=FAMILIES[family], tie_word_embeddings=False, **IDS
    )
    if family == "Qwen3VL":
        config.text_config.architectures = ["Qwen3ForCausalLM"]  # vLLM asks, on a CPU
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    for name, p in model.named_parameters():  # so large that attention, and the image, count
        p.data.normal_(std=2 * p[0].numel() ** -0.5 if p.ndim > 1 else 0.3)
        if "norm" in name and name.endswith("weight"):
            p.data.add_(1)
    model.save_pretrained(folder)
    _processor(family).save_pretrained(folder)
    return model


def save_without_weights(folder: Path) -> None:
    """Write Qwen2.5-VL 7B as published, but of these words, for vLLM to draw its weights."""
    config = transformers.Qwen2_5_VLConfig(
        text_config=PUBLISHED_TEXT,
        vision_config=PUBLISHED_VISION,
        tie_word_embeddings=False,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        dtype="bfloat16",
        **IDS,
    )
    config.save_pretrained(folder)
    _processor("Qwen2_5_VL", most_patches=1 << 14).save_pretrained(folder)


def _processor(family: str, most_patches: int = 128) -> transformers.ProcessorMixin:
    words = [*SPECIAL, *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens={
            "image_token": SPECIAL[1],
            "video_token": SPECIAL[2],
            "vision_bos_token": SPECIAL[3],
            "vision_eos_token": SPECIAL[4],
        },
    )
    patch = FAMILIES[family]["patch_size"]
    pixels = {"shortest_edge": 4 * patch**2, "longest_edge": most_patches * patch**2}
    sizes = {"size": pixels, "patch_size": patch}
    name = "Qwen3VL" if family == "Qwen3VL" else "Qwen2VL"
    return getattr(transformers, f"{family}Processor")(
        transformers.Qwen2VLImageProcessor(**sizes),
        fast,
        getattr(transformers, f"{name}VideoProcessor")(**sizes),
    )
