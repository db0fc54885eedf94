"""Small Hugging Face vision towers and models of every family, with weights that tell."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLVisionConfig,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Grids (t, h, w) in patches: windows that are cut off at the edges, a clip, several images.
GRIDS = {
    "image": [(1, 10, 14)],
    "clip": [(3, 8, 10)],
    "several": [(1, 6, 18), (2, 4, 10), (1, 2, 2)],
}
IMAGE_TOKEN, VISION_START = 90, 91


def vision_config(family):
    """Head dims 80, 16 and 72; Qwen2.5's MLP has a width that padding changes."""
    if family == "qwen2":
        return Qwen2VLVisionConfig(depth=2, embed_dim=160, num_heads=2, hidden_size=48, mlp_ratio=2)
    if family == "qwen2_5":
        return Qwen2_5_VLVisionConfig(
            depth=3,
            hidden_size=64,
            num_heads=4,
            intermediate_size=84,
            out_hidden_size=48,
            fullatt_block_indexes=[1],
        )
    config = Qwen3VLMoeVisionConfig if family == "qwen3_moe" else Qwen3VLVisionConfig
    return config(
        depth=3,
        hidden_size=144,
        num_heads=2,
        intermediate_size=164,
        out_hidden_size=48,
        num_position_embeddings=36,
        deepstack_visual_indexes=[0, 2],
    )


CLASSES = {
    "qwen2": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5": Qwen2_5_VisionTransformerPretrainedModel,
    "qwen3": Qwen3VLVisionModel,
    "qwen3_moe": Qwen3VLMoeVisionModel,
}


def make_tower(family):
    """A tower in fp32 for inference on DEVICE."""
    return with_telling_weights(CLASSES[family](vision_config(family))).eval().to(DEVICE)


def make_model():
    """A whole Qwen2.5-VL model: vision tower, language model and head."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 96,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 4, 4]},
        },
        vision_config=vision_config("qwen2_5").to_dict(),
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=VISION_START,
    )
    return with_telling_weights(Qwen2_5_VLForConditionalGeneration(config)).eval().to(DEVICE)


def with_telling_weights(model):
    """Redraw the weights: as Hugging Face draws them, attention is uniform and biases are zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            if draw.ndim > 1:
                parameter.copy_(1.2 * draw * draw[0].numel() ** -0.5)
            else:
                parameter.copy_(0.3 * draw + float(parameter.mean() == 1))
    return model


def random_inputs(tower, grid, seed=0):
    """Patches [tokens, patch_dim] fp32 and grid [images, 3]."""
    config = tower.config
    grid_thw = torch.tensor(grid, device=DEVICE)
    patch_dim = config.in_channels * config.temporal_patch_size * config.patch_size**2
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(int(grid_thw.prod(1).sum()), patch_dim, generator=generator)
    return patches.to(DEVICE), grid_thw


def run(tower, patches, grid_thw):
    """The hidden state after every block, then what the tower returns; all tensors."""
    states = []
    hooks = [
        block.register_forward_hook(lambda _block, _inputs, output: states.append(output))
        for block in tower.blocks
    ]
    try:
        output = tower(patches, grid_thw=grid_thw)
    finally:
        for hook in hooks:
            hook.remove()
    return states + tensors_of(output)


def embed(tower, inputs=None):
    """The embeddings of given patches, or of some."""
    with torch.no_grad():
        return tensors_of(tower(*(inputs or random_inputs(tower, GRIDS["image"]))))[-1]


def tensors_of(output):
    """A tensor, a sequence or a model output as a list of tensors."""
    if output is None or isinstance(output, torch.Tensor):
        return [] if output is None else [output]
    values = output.values() if hasattr(output, "values") else output
    return [tensor for value in values for tensor in tensors_of(value)]


class Waits(TorchDispatchMode):
    """Counts the values that the host reads from tensors, on a GPU a wait each."""

    count = 0

    def __torch_dispatch__(self, called, types, args=(), kwargs=None):
        self.count += called is torch.ops.aten._local_scalar_dense.default
        return called(*args, **(kwargs or {}))


def relative_error(result, reference):
    """||result - reference|| / ||reference||."""
    reference = reference.double()
    return ((result.double() - reference).norm() / reference.norm()).item()


def snapshot(model):
    """Everything that restore has to bring back, beside the bits of parameters and buffers."""
    return {
        name: (type(module), dict.fromkeys(vars(module)), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    }


def bits_of(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_same_bits(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def kinds_of(tower):
    return {type(module).__name__.partition("_")[0] for module in tower.modules()}
