"""The rearrangement of a checkpoint's tensors that both towers share."""

import numpy as np
import pytest

from flax_models.weights import tower_weights
from tests.tower_checkpoints import SMALL_TOWERS, random_tensors


@pytest.fixture(params=SMALL_TOWERS)
def config(request):
    return SMALL_TOWERS[request.param]


def test_the_padded_mlp_computes_the_same(config):
    tensors = random_tensors(config)
    weights = tower_weights(config, tensors)
    width, padded = config.intermediate_size, config.aligned_intermediate_size
    assert padded > width
    x = np.random.default_rng(1).standard_normal((5, config.hidden_size)).astype(np.float32)
    for block in range(config.depth):
        mlp = f"blocks.{block}.mlp"
        both = x @ weights[f"{mlp}.gate_up.weight"].T + weights[f"{mlp}.gate_up.bias"]
        assert both.shape == (5, 2 * padded)
        for half, name in zip(np.split(both, 2, axis=1), ("gate_proj", "up_proj"), strict=True):
            alone = x @ tensors[f"{mlp}.{name}.weight"].T + tensors[f"{mlp}.{name}.bias"]
            np.testing.assert_allclose(half[:, :width], alone, rtol=1e-5, atol=1e-5)
            assert not half[:, width:].any()
        down = weights[f"{mlp}.down.weight"]
        np.testing.assert_array_equal(down[:, :width], tensors[f"{mlp}.down_proj.weight"])
        assert not down[:, width:].any()


def test_everything_else_is_passed_on_without_a_copy(config):
    tensors = random_tensors(config)
    weights = tower_weights(config, tensors)
    for name in ("blocks.1.attn.qkv.weight", "blocks.3.norm2.weight", "merger.ln_q.weight"):
        assert weights[name] is tensors[name]
    for name, number in (("fc1", 0), ("fc2", 2)):
        assert weights[f"merger.{name}.weight"] is tensors[f"merger.mlp.{number}.weight"]
    assert weights["patch_embed.proj.weight"].shape == (config.hidden_size, config.patch_dim)
    assert np.shares_memory(weights["patch_embed.proj.weight"], tensors["patch_embed.proj.weight"])


def test_a_missing_tensor(config):
    tensors = random_tensors(config)
    del tensors["blocks.2.mlp.up_proj.bias"]
    with pytest.raises(KeyError, match=r"blocks\.2\.mlp\.up_proj\.bias"):
        tower_weights(config, tensors)
