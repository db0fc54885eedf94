"""What sets the families of Qwen's vision towers apart; everything else they share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """The towers of one model type.

    Attributes:
        model_types: the names that a config.json gives them: of a whole model, and as transformers
            5 calls a tower alone. A model with a mixture of experts has the tower of its family.
            Of an Omni model also that of its part which sees and hears, the thinker.
        norm: every norm is an RMSNorm without, or a LayerNorm with a bias.
        activation: of the MLP, under its name in config.json.
        windows: most blocks attend within windows; elsewhere all attend within whole frames.
        patch_bias: the patch embedding has a bias.
        position_table: a learned table of position embeddings.
        deepstack: a checkpoint's name of the DeepStack mergers, which stand beside the one at the
            end; None where there are none.
        attention_inputs: of the products before the attention: q, k and v in one, or each.
        mlp_inputs: of the products before the activation: gate and up, or one.
        mlp_output: of the product after it.
        merger: of a merger's norm and of its two products.
        config_keys: what config.json says of sizes, from our names to the file's; an "mlp_ratio"
            stands for intermediate_size, over hidden_size.
        config_defaults: what a file means that leaves a value out, by the file's names:
            transformers' defaults, which transformers 4.45 to 4.49 did not write. Without one here,
            the file must state it.
        defaults: values of the published towers that are not those of Qwen2.5-VL 7B.
        image_settings: values of `ImageConfig` as published that are not its defaults.
        video_settings: values of `VideoConfig` as published that are not its defaults.
        fixed_video_limits: transformers' processor of the whole model has clips' pixel limits of
            its own, whatever the checkpoint's files say.
    """

    model_types: tuple[str, ...]
    norm: Literal["rms", "layer"]
    activation: Literal["quick_gelu", "silu", "gelu_pytorch_tanh"]
    windows: bool
    patch_bias: bool
    position_table: bool
    mlp_inputs: tuple[str, ...]
    mlp_output: str
    merger: tuple[str, str, str]
    config_keys: Mapping[str, str]
    config_defaults: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    image_settings: Mapping[str, Any] = field(default_factory=dict)
    video_settings: Mapping[str, Any] = field(default_factory=dict)
    fixed_video_limits: bool = False
    deepstack: str | None = None
    attention_inputs: tuple[str, ...] = ("qkv",)

    @property
    def tower_type(self) -> str:
        """What transformers 5 calls a tower alone."""
        return next(name for name in self.model_types if "_vision" in name)

    @property
    def late_norm(self) -> bool:
        """Whether towers for inference norm before an MLP in its gated activation: see gated.py."""
        return len(self.mlp_inputs) == 2 and self.norm == "rms"


_NO_WINDOWS = {"window_size": None, "fullatt_block_indexes": ()}


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_HALVES = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_SIZES = _same("depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size")

FAMILIES = {
    "qwen2_vl": Family(
        model_types=("qwen2_vl", "qwen2_vl_vision"),
        norm="layer",
        activation="quick_gelu",
        windows=False,
        patch_bias=False,
        position_table=False,
        mlp_inputs=("fc1",),
        mlp_output="fc2",
        merger=("ln_q", "mlp.0", "mlp.2"),
        config_keys=_same("depth", "num_heads", "mlp_ratio")
        | {"hidden_size": "embed_dim", "out_hidden_size": "hidden_size"},
        config_defaults={
            "depth": 32,
            "embed_dim": 1280,
            "num_heads": 16,
            "mlp_ratio": 4,
            "hidden_size": 3584,
        },
        defaults={"intermediate_size": 5120, **_NO_WINDOWS},
    ),
    "qwen2_5_vl": Family(
        model_types=("qwen2_5_vl", "qwen2_5_vl_vision"),
        norm="rms",
        activation="silu",
        windows=True,
        patch_bias=False,
        position_table=False,
        mlp_inputs=("gate_proj", "up_proj"),
        mlp_output="down_proj",
        merger=("ln_q", "mlp.0", "mlp.2"),
        config_keys=_SIZES,
        # transformers' hidden_size is no published tower's.
        config_defaults={
            "depth": 32,
            "num_heads": 16,
            "intermediate_size": 3420,
            "out_hidden_size": 3584,
        },
    ),
    "qwen3_vl": Family(
        model_types=("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision"),
        norm="layer",
        activation="gelu_pytorch_tanh",
        windows=False,
        patch_bias=True,
        position_table=True,
        mlp_inputs=("linear_fc1",),
        mlp_output="linear_fc2",
        deepstack="deepstack_merger_list",
        merger=("norm", "linear_fc1", "linear_fc2"),
        config_keys=_SIZES | _same("num_position_embeddings", "deepstack_visual_indexes"),
        defaults={
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": (8, 16, 24),
            **_NO_WINDOWS,
        },
        image_settings={
            "min_pixels": 256 * 256,
            "max_pixels": 4096 * 4096,
            **_HALVES,
        },
        video_settings={
            "processor": "Qwen3VLVideoProcessor",
            "min_pixels": 4096,
            "max_pixels": 25165824,
        },
    ),
}
_QWEN3_VL = FAMILIES["qwen3_vl"]

FAMILIES |= {
    "qwen2_5_omni": replace(
        FAMILIES["qwen2_5_vl"],
        model_types=("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen2_5_omni_vision_encoder"),
        attention_inputs=("q", "k", "v"),
        fixed_video_limits=True,
    ),
    "qwen3_omni_moe": replace(
        _QWEN3_VL,
        model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_vision_encoder"),
        deepstack="merger_list",
        merger=("ln_q", "mlp.0", "mlp.2"),
        config_defaults={"num_position_embeddings": 2304},  # older files state an image's size
        defaults={**_QWEN3_VL.defaults, "out_hidden_size": 2048},
        image_settings={
            **_QWEN3_VL.image_settings,
            "min_pixels": 56 * 56,
            "max_pixels": 16384 * 28 * 28,
        },
        video_settings={
            "min_pixels": 128 * 32 * 32,
            "max_pixels": 768 * 32 * 32,
            **_HALVES,
        },
        fixed_video_limits=True,
    ),
    # Older files of it state an empty deepstack_visual_indexes.
    "qwen3_5": replace(
        _QWEN3_VL,
        model_types=tuple(
            f"{model}{rest}"
            for model in ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
            for rest in ("", "_vision")
        ),
        deepstack=None,
        config_keys=_SIZES | _same("num_position_embeddings"),
        defaults={**_QWEN3_VL.defaults, "deepstack_visual_indexes": ()},
    ),
}
