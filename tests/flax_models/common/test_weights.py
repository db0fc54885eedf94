"""The rearrangement of a checkpoint's tensors that both towers share."""

import re

import ml_dtypes
import numpy as np
import pytest

from flax_models import VisionConfig
from flax_models.common.weights import tower_weights
from tests.gated_contract import oracle
from tests.tower_checkpoints import SMALL_TOWERS, random_tensors

EARLY = [name for name, config in SMALL_TOWERS.items() if not config.family.late_norm]
LATE = [name for name, config in SMALL_TOWERS.items() if config.family.late_norm]


@pytest.fixture(params=SMALL_TOWERS)
def config(request):
    return SMALL_TOWERS[request.param]


@pytest.mark.parametrize("config", EARLY, indirect=True)
def test_the_padded_mlp_computes_the_same(config):
    tensors = random_tensors(config)
    weights = tower_weights(config, tensors)
    width, padded = config.intermediate_size, config.aligned_intermediate_size
    [up], down = config.family.mlp_inputs, config.family.mlp_output
    x = np.random.default_rng(1).standard_normal((5, config.hidden_size)).astype(np.float32)
    for block in range(config.depth):
        mlp = f"blocks.{block}.mlp"
        ours = x @ weights[f"{mlp}.up.weight"].T + weights[f"{mlp}.up.bias"]
        theirs = x @ tensors[f"{mlp}.{up}.weight"].T + tensors[f"{mlp}.{up}.bias"]
        assert ours.shape == (5, padded)
        np.testing.assert_allclose(ours[:, :width], theirs, rtol=1e-5, atol=1e-5)
        assert not ours[:, width:].any()
        weight = weights[f"{mlp}.down.weight"]
        np.testing.assert_array_equal(weight[:, :width], tensors[f"{mlp}.{down}.weight"])
        assert not weight[:, width:].any()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=str)
@pytest.mark.parametrize("config", LATE, indirect=True)
def test_the_channel_of_biases_is_1_in_every_dtype(config, dtype):
    """To the bit: what it multiplies, the biases of attention and MLP, are not scaled."""
    weights = tower_weights(config, random_tensors(config), dtype)
    bias = weights["blocks.0.mlp.bias"].reshape(2, -1)[:, config.intermediate_size]
    gate, up = bias.astype(np.float32)
    assert gate / (1 + np.exp(-gate)) * up == 1


@pytest.mark.parametrize("config", LATE, indirect=True)
def test_a_late_norm_computes_the_same(config):
    """From the stream behind each attention, without its bias, to that behind the MLP, in fp64."""
    tensors = {name: x.astype(np.float64) for name, x in random_tensors(config).items()}
    weights = tower_weights(config, tensors, np.float64)
    stream = 3 * np.random.default_rng(1).standard_normal((5, config.hidden_size))
    for index in range(config.depth):
        block, mlp = f"blocks.{index}", f"blocks.{index}.mlp"

        def linear(name, x, mlp=mlp):
            return x @ tensors[f"{mlp}.{name}.weight"].T + tensors[f"{mlp}.{name}.bias"]

        x = stream + tensors[f"{block}.attn.proj.bias"]
        normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True)) * tensors[f"{block}.norm2.weight"]
        gate, up = (linear(name, normed) for name in config.family.mlp_inputs)
        expected = x + linear(config.family.mlp_output, gate / (1 + np.exp(-gate)) * up)

        product = stream @ weights[f"{mlp}.gate_up.weight"].T
        biases = [weights[f"{mlp}.{name}"] for name in ("stream_bias", "product_bias", "bias")]
        activated = oracle(product, stream, biases, eps=0)
        assert activated.shape == (5, config.aligned_intermediate_size)
        np.testing.assert_allclose(activated[:, config.intermediate_size], 1, rtol=1e-13)
        assert not activated[:, config.intermediate_size + 1 :].any()
        ours = stream + activated @ weights[f"{mlp}.down.weight"].T
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)  # of fp32 sums
    assert not any(name.endswith(("norm2.weight", "attn.proj.bias")) for name in weights)


@pytest.mark.parametrize("config", LATE, indirect=True)
def test_what_is_computed_has_the_towers_dtype_or_the_checkpoints(config):
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in random_tensors(config).items()}
    for dtype in (None, "bfloat16", np.float32):
        for name, weight in tower_weights(config, tensors, dtype).items():
            computed = re.search(r"mlp\.", name)
            assert weight.dtype == (dtype or "bfloat16" if computed else "bfloat16"), name


def test_published_widths_are_aligned():
    widths = {
        VisionConfig.qwen2_vl_7b(): (5120, 5120),
        VisionConfig.qwen2_5_vl_7b(): (3420, 3456),
        VisionConfig.qwen2_5_vl_72b(): (3456, 3520),  # one channel more carries biases
        VisionConfig.qwen3_vl_4b(): (4096, 4096),
        VisionConfig.qwen3_vl_8b(): (4304, 4352),
    }
    for config, (published, stored) in widths.items():
        assert (config.intermediate_size, config.aligned_intermediate_size) == (published, stored)


def test_everything_else_is_passed_on_without_a_copy(config):
    tensors = random_tensors(config)
    weights = tower_weights(config, tensors)
    for name in ("blocks.1.attn.qkv.weight", "blocks.0.norm1.weight"):
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
