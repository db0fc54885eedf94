"""Small random checkpoints for the tests of both towers, with and without Hugging Face's help."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from flax_models import VisionConfig
from flax_models.common.checkpoint import expected_tensors

# Every family; in Qwen2.5-VL's two, head dims 80 and 16, real windows of 8 x 8 patches, a windowed
# block before and after one that sees whole frames; in Qwen3-VL's head dim 72 and a table that is
# both stretched and shrunk. MLP widths that padding changes. Their successors'
# are less deep.
SMALL_TOWERS = {
    "head_dim_80": VisionConfig(
        depth=4,
        hidden_size=160,
        num_heads=2,
        intermediate_size=180,
        out_hidden_size=96,
        fullatt_block_indexes=(1, 3),
    ),
    "head_dim_16": VisionConfig(
        depth=4,
        hidden_size=64,
        num_heads=4,
        intermediate_size=84,
        out_hidden_size=48,
        fullatt_block_indexes=(2,),
    ),
    "qwen2_vl": VisionConfig.of(
        "qwen2_vl",
        depth=2,
        hidden_size=80,
        num_heads=1,
        intermediate_size=320,
        out_hidden_size=48,
    ),
    "qwen3_vl": VisionConfig.of(
        "qwen3_vl",
        depth=3,
        hidden_size=144,
        num_heads=2,
        intermediate_size=172,
        out_hidden_size=48,
        num_position_embeddings=81,
        deepstack_visual_indexes=(0, 1),
    ),
}


def each_family_and(name, usual, *others):
    """Parametrize by `config` and a second name: all towers by the usual value, one by others."""
    values = [*((family, usual) for family in SMALL_TOWERS), *(("head_dim_16", x) for x in others)]
    return pytest.mark.parametrize(("config", name), values, indirect=["config"])


SMALL_TOWERS |= {
    "qwen2_5_omni": replace(
        SMALL_TOWERS["head_dim_16"], model_type="qwen2_5_omni", depth=2, fullatt_block_indexes=(1,)
    ),
    "qwen3_omni_moe": replace(
        SMALL_TOWERS["qwen3_vl"],
        model_type="qwen3_omni_moe",
        depth=2,
        deepstack_visual_indexes=(0,),
    ),
    "qwen3_5": replace(
        SMALL_TOWERS["qwen3_vl"], model_type="qwen3_5", depth=2, deepstack_visual_indexes=()
    ),
}

# One narrow block that sees no whole frames, and patches of 24 values: calls of 20,000 tokens take
# a CPU next to no time.
WINDOWS_ALONE = VisionConfig(
    depth=1,
    hidden_size=16,
    num_heads=2,
    intermediate_size=20,
    out_hidden_size=8,
    patch_size=2,
    window_size=16,
    fullatt_block_indexes=(),
)

# Grids (t, h, w) in patches: sides that are multiples of the 8-patch window and sides that are not,
# clips, and odd mixes of both.
GRIDS = {
    "one_whole_window": [(1, 8, 8)],
    "smaller_than_a_window": [(1, 2, 6)],
    "edge_windows": [(1, 18, 12)],
    "clip": [(3, 10, 8)],
    "mix": [(1, 6, 20), (2, 10, 4), (1, 2, 2), (3, 8, 10)],
}


def random_patches(config, grid_thw, seed=0):
    """Patches as a processor returns them, fp32 [tokens, patch_dim]."""
    tokens = int(np.prod(grid_thw, axis=1).sum())
    values = np.random.default_rng(seed).standard_normal((tokens, config.patch_dim))
    return values.astype(np.float32)


def random_tensors(config, seed=0):
    """Every tensor of a tower, fp32, such that no part of it can be left out unnoticed.

    Hugging Face's own initialisation has biases of 0, norms of 1 and nearly uniform attention.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        values = rng.standard_normal(shape)
        if name == "pos_embed.weight":  # as large as what it is added to
            values *= 0.5
        elif len(shape) > 1:
            values /= np.sqrt(np.prod(shape[1:]))
        elif name.endswith("bias"):
            values *= 0.2
        else:
            values = 1 + 0.2 * values
        tensors[name] = values.astype(np.float32)
    return tensors


def write_checkpoint(directory, config, prefix=""):
    """Write a vision tower's checkpoint, or with a prefix such as "visual." a whole model's."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {prefix + name: value for name, value in random_tensors(config).items()}
    values = config_json(config)
    if prefix:
        tensors["model.embed_tokens.weight"] = np.zeros((8, 8), np.float32)
        values = {"model_type": config.model_type, "vision_config": values}
        if prefix.startswith("thinker."):
            values = {"model_type": config.model_type, "thinker_config": values}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return directory


def config_json(config):
    """What Hugging Face's config.json says of a tower."""
    family = config.family
    values = {
        theirs: getattr(config, ours)
        for ours, theirs in family.config_keys.items()
        if theirs != "mlp_ratio"
    }
    if "mlp_ratio" in family.config_keys:
        values["mlp_ratio"] = config.intermediate_size // config.hidden_size
    if family.windows:
        values["fullatt_block_indexes"] = config.fullatt_block_indexes
        values["window_size"] = config.window_size
    return values | {"model_type": config.model_type, "patch_size": config.patch_size}


def save_hugging_face_tower(directory, config, **changed):
    """Have Hugging Face's `save_pretrained` write the same checkpoint; needs transformers.

    changed: tensors to store in place of the random ones.
    """
    import torch

    from compare.common.errors import UnavailableError
    from compare.implementations.huggingface import vision_classes

    try:
        classes = vision_classes(config.model_type)
    except UnavailableError as error:  # transformers before 5 has no Qwen3.5
        pytest.skip(str(error))
    values = {name: value for name, value in config_json(config).items() if name != "model_type"}
    model = classes.model(classes.config(**values))
    tensors = random_tensors(config) | changed
    tensors = {name: torch.from_numpy(value) for name, value in tensors.items()}
    model.load_state_dict(tensors)
    model.save_pretrained(directory)
    return directory


class HuggingFaceTower:
    """Hugging Face's tower from a checkpoint, with NumPy in and out.

    In fp32 on the CPU, where that is exact; in less, to be compared with ours, where ours runs.
    """

    def __init__(self, directory, dtype="float32"):
        import torch

        from compare.implementations.huggingface import vision_classes

        self._torch = torch
        model_type = VisionConfig.from_pretrained(directory).model_type
        # By dtype=, not by .to(): that would round the rotary frequencies too.
        self._model = (
            vision_classes(model_type)
            .model.from_pretrained(directory, dtype=getattr(torch, dtype))
            .eval()
        )
        on_gpu = dtype != "float32" and torch.cuda.is_available()
        self._device = torch.device("cuda" if on_gpu else "cpu")
        self._model.to(self._device)

    def __call__(self, pixel_values, grid_thw):
        """The embeddings [tokens / 4, out_hidden_size] fp32, DeepStack features beside them."""
        return self.run(pixel_values, grid_thw)[0]

    def run(self, pixel_values, grid_thw):
        """The same, and the hidden states [tokens, hidden_size] after each block; fp32."""
        torch = self._torch
        states = []
        hooks = [
            block.register_forward_hook(lambda _block, _inputs, output: states.append(output))
            for block in self._model.blocks
        ]
        with torch.no_grad():
            output = self._model(
                torch.from_numpy(pixel_values).to(self._device),
                grid_thw=torch.tensor(grid_thw, device=self._device),
            )
        for hook in hooks:
            hook.remove()
        # transformers before 5 returns tensors, since then an object that holds them.
        if isinstance(output, torch.Tensor):
            output = (output, [])
        elif not isinstance(output, tuple):
            output = (output.pooler_output, getattr(output, "deepstack_features", []))
        embeddings, features = output
        beside = torch.cat([embeddings, *features], dim=1)
        return beside.float().cpu().numpy(), [state.float().cpu().numpy() for state in states]
