"""The rearrangement of a checkpoint's tensors that both towers share."""

import re

import numpy as np
import pytest

from flax_models import VisionConfig
from flax_models.weights import tower_weights
from tests.tower_checkpoints import SMALL_TOWERS, random_tensors


@pytest.fixture(params=SMALL_TOWERS)
def config(request):
    return SMALL_TOWERS[request.param]


def test_the_padded_mlp_computes_the_same(config):
    tensors = random_tensors(config)
    weights = tower_weights(config, tensors)
    family = config.family
    width, padded = config.intermediate_size, config.aligned_intermediate_size
    up = "gate_up" if family.gated_mlp else "up"
    x = np.random.default_rng(1).standard_normal((5, config.hidden_size)).astype(np.float32)
    for block in range(config.depth):
        mlp = f"blocks.{block}.mlp"
        together = x @ weights[f"{mlp}.{up}.weight"].T + weights[f"{mlp}.{up}.bias"]
        parts = np.split(together, len(family.mlp_inputs), axis=1)
        for part, name in zip(parts, family.mlp_inputs, strict=True):
            assert part.shape == (5, padded)
            alone = x @ tensors[f"{mlp}.{name}.weight"].T + tensors[f"{mlp}.{name}.bias"]
            np.testing.assert_allclose(part[:, :width], alone, rtol=1e-5, atol=1e-5)
            assert not part[:, width:].any()
        down = weights[f"{mlp}.down.weight"]
        stored = tensors[f"{mlp}.{family.mlp_output}.weight"]
        np.testing.assert_array_equal(down[:, :width], stored)
        assert not down[:, width:].any()


def test_published_widths_are_aligned():
    widths = {
        VisionConfig.qwen2_vl_7b(): (5120, 5120),
        VisionConfig.qwen2_5_vl_7b(): (3420, 3456),
        VisionConfig.qwen3_vl_4b(): (4096, 4096),
        VisionConfig.qwen3_vl_8b(): (4304, 4352),
    }
    for config, (published, stored) in widths.items():
        assert (config.intermediate_size, config.aligned_intermediate_size) == (published, stored)


def test_everything_else_is_passed_on_without_a_copy(config):
    tensors = random_tensors(config)
    weights = tower_weights(config, tensors)
    for name in ("blocks.1.attn.qkv.weight", "blocks.0.norm2.weight"):
        assert weights[name] is tensors[name]
    mergers = {"merger": "merger"} | {
        f"deepstack_mergers.{i}": f"deepstack_merger_list.{i}"
        for i in range(len(config.deepstack_visual_indexes))
    }
    for ours, theirs in mergers.items():
        for layer, stored in zip(("norm", "fc1", "fc2"), config.family.merger, strict=True):
            assert weights[f"{ours}.{layer}.weight"] is tensors[f"{theirs}.{stored}.weight"]
    if config.num_position_embeddings:
        assert weights["position_table.weight"] is tensors["pos_embed.weight"]
    assert weights["patch_embed.proj.weight"].shape == (config.hidden_size, config.patch_dim)
    assert np.shares_memory(weights["patch_embed.proj.weight"], tensors["patch_embed.proj.weight"])


def test_a_missing_tensor(config):
    tensors = random_tensors(config)
    missing = f"blocks.1.mlp.{config.family.mlp_inputs[-1]}.bias"
    del tensors[missing]
    with pytest.raises(KeyError, match=re.escape(missing)):
        tower_weights(config, tensors)
