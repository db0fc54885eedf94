"""Small towers for the tests: a configuration, and checkpoints as Hugging Face saves them."""

from types import SimpleNamespace

import pytest

from flax_models.common.config import VisionConfig

TINY = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 36,
    "out_hidden_size": 24,
    "fullatt_block_indexes": [1],
}
# Of each family, in Hugging Face's words.
TINY_VISION = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 24},
    "qwen2_5_vl": TINY,
    "qwen3_vl": {
        **{name: value for name, value in TINY.items() if name != "fullatt_block_indexes"},
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0],
    },
}
TINY_TEXT = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "bos_token_id": 5,
    "eos_token_id": 6,
    # As transformers 4.57 takes them, and 5 still does.
    "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2]},
}
# Names of the whole models' classes, less their endings.
_CLASSES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}


@pytest.fixture
def tiny_config():
    return VisionConfig(**TINY)


@pytest.fixture(scope="session", params=TINY_VISION)
def hf_model(request):
    """A whole vision-language model of Hugging Face, tiny and random, of each family."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    name = _CLASSES[request.param]
    config = getattr(transformers, f"{name}Config")(
        text_config=TINY_TEXT,
        vision_config=TINY_VISION[request.param],
        image_token_id=1,
        video_token_id=2,
        vision_start_token_id=3,
        vision_end_token_id=4,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


@pytest.fixture(scope="session")
def hf_checkpoints(hf_model, tmp_path_factory):
    """Directories that Hugging Face's save_pretrained writes, by what is in them."""
    root = tmp_path_factory.mktemp("hugging_face")
    hf_model.model.visual.save_pretrained(root / "tower")
    hf_model.save_pretrained(root / "whole")
    hf_model.save_pretrained(root / "sharded", max_shard_size="40KB")
    return SimpleNamespace(tower=root / "tower", whole=root / "whole", sharded=root / "sharded")
