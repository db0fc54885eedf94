"""Small towers for the tests: a configuration, and checkpoints as Hugging Face saves them."""

from types import SimpleNamespace

import pytest

from flax_models.config import VisionConfig

TINY = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 36,
    "out_hidden_size": 24,
    "fullatt_block_indexes": [1],
}
TINY_TEXT = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": 5,
    "eos_token_id": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]},
}


@pytest.fixture
def tiny_config():
    return VisionConfig(**TINY)


@pytest.fixture(scope="session")
def hf_model():
    """A whole vision-language model of Hugging Face, tiny and random."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(
        text_config=TINY_TEXT,
        vision_config=TINY,
        image_token_id=1,
        video_token_id=2,
        vision_start_token_id=3,
        vision_end_token_id=4,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


@pytest.fixture(scope="session")
def hf_checkpoints(hf_model, tmp_path_factory):
    """Directories that Hugging Face's save_pretrained writes, by what is in them."""
    root = tmp_path_factory.mktemp("hugging_face")
    hf_model.model.visual.save_pretrained(root / "tower")
    hf_model.save_pretrained(root / "whole")
    hf_model.save_pretrained(root / "sharded", max_shard_size="40KB")
    return SimpleNamespace(tower=root / "tower", whole=root / "whole", sharded=root / "sharded")


@pytest.fixture
def compilations():
    """A name for each program that XLA compiles while the test runs."""
    monitoring = pytest.importorskip("jax").monitoring
    compiled = []

    def listen(event, seconds, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details.get("fun_name", event))

    monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    monitoring.unregister_event_duration_listener(listen)
