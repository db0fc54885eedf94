"""The named workloads of whole towers: agreement and benchmarks take their images from here.

A workload is one call. Sizes in names are pixels a side of square images: `tower-896` is the tower
of Qwen2.5-VL on one 896 x 896 image, `qwen3-tower-896` Qwen3-VL's, `tower-video-8x16x448` eight
clips of 16 frames in one call.
"""

import itertools
from dataclasses import dataclass, field, replace

import numpy as np

from compare.workloads.kernels import PATCH, SIDES, Grid, KernelWorkload, Kind
from flax_models import VisionConfig


@dataclass(frozen=True)
class Visual:
    """An image, or a clip of some frames; height and width in pixels."""

    height: int
    width: int
    frames: int = 1

    def grid(self, patch: int) -> tuple[int, int, int]:
        """(t, h, w) in patches of so many pixels a side.

        A temporal patch is two frames; a last one alone counts twice, as an image does.
        """
        return -(-self.frames // 2), self.height // patch, self.width // patch


@dataclass(frozen=True)
class TowerWorkload:
    """One call of a whole tower on photographs, or clips made from one.

    Attributes:
        visuals: their sides are multiples of a merge unit's.
        config: of the tower.
        gradients: whether it is a step of training, forward and backward.
        steps: of fine-tuning whose losses are compared; 0: calls are timed.
    """

    name: str
    visuals: tuple[Visual, ...]
    config: VisionConfig = field(default_factory=VisionConfig.qwen2_5_vl_7b)
    gradients: bool = False
    steps: int = 0

    @property
    def grid_thw(self) -> Grid:
        """(t, h, w) of each visual."""
        return tuple(visual.grid(self.config.patch_size) for visual in self.visuals)

    @property
    def frames(self) -> int:
        """Frames of all clips; 0 where there are only images."""
        return sum(visual.frames for visual in self.visuals if visual.frames > 1)

    @property
    def tokens(self) -> int:
        """Tokens of the call, before merging."""
        return int(sum(t * h * w for t, h, w in self.grid_thw))

    @property
    def windows(self) -> int:
        """Windows of all images, where the tower has windows."""
        return len(self._attention("windows").lengths)

    @property
    def bytes_moved(self) -> int:
        """Fewest bytes of the windowed layers' attention, all of them together."""
        windowed = self.config.depth - self._full_layers
        return windowed * self._attention("windows").bytes_moved

    @property
    def matrix_flops(self) -> int:
        """Operations of every matrix product and of the full-attention layers' attention.

        A product's backward pass has two: the gradients in what enters it and in its weights.
        """
        config, hidden = self.config, self.config.hidden_size
        merged = hidden * config.merge_unit
        mlp = (len(config.family.mlp_inputs) + 1) * config.intermediate_size
        layer = 2 * self.tokens * hidden * (4 * hidden + mlp)
        patch_embed = 2 * self.tokens * config.patch_dim * hidden
        merger = 2 * (self.tokens // config.merge_unit) * merged * (merged + config.out_hidden_size)
        mergers = (1 + len(config.deepstack_visual_indexes)) * merger
        attention = self._full_layers * self._attention("frames").matrix_flops
        products = config.depth * layer + patch_embed + mergers
        return products * (3 if self.gradients else 1) + attention

    @property
    def _full_layers(self) -> int:
        return sum(map(self.config.sees_frames, range(self.config.depth)))

    def _attention(self, kind: Kind) -> KernelWorkload:
        return KernelWorkload(
            f"{self.name} {kind}",
            kind,
            self.grid_thw,
            self.config.num_heads,
            self.config.head_dim,
            gradients=self.gradients,
        )


def _mixed_images(
    count: int, smallest: int, largest: int, patch: int = PATCH
) -> tuple[Visual, ...]:
    """Images whose long sides grow evenly, in turn of the shapes that photographs have."""
    unit = 2 * patch
    long_sides = np.linspace(smallest, largest, count)
    shapes = itertools.cycle([(3, 4), (2, 3), (1, 1), (9, 16), (4, 3), (3, 2), (16, 9)])
    return tuple(
        Visual(*(unit * round(side * part / max(shape) / unit) for part in shape))
        for side, shape in zip(long_sides.tolist(), shapes, strict=False)
    )


# The towers that are compared, by what stands in a workload's name.
TOWERS = {
    "tower": VisionConfig.qwen2_5_vl_7b(),
    "qwen2-tower": VisionConfig.qwen2_vl_7b(),
    "qwen3-tower": VisionConfig.qwen3_vl_8b(),
}

# Towers of Qwen3.5's smaller models, which are timed alone: they are built as Qwen3-VL's.
_SMALLER = {
    "qwen3_5_tower": VisionConfig.of(
        "qwen3_5",
        **{"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096},
    ),
    "qwen3_5_small_tower": VisionConfig.of(
        "qwen3_5",
        **{"depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072},
    ),
}

# As the real towers are built, small enough for a CPU: two heads of their head_dim, windows and
# frames where there are both, DeepStack features of a block in the middle.
_SMALL = {"depth": 4, "num_heads": 2, "out_hidden_size": 192}
SMALL_TOWERS = {
    "tower": VisionConfig(
        **_SMALL, hidden_size=160, intermediate_size=342, fullatt_block_indexes=(1, 3)
    ),
    "qwen2-tower": VisionConfig.of("qwen2_vl", **_SMALL, hidden_size=160, intermediate_size=640),
    "qwen3-tower": VisionConfig.of(
        "qwen3_vl",
        **(_SMALL | {"hidden_size": 144, "intermediate_size": 538}),
        num_position_embeddings=144,
        deepstack_visual_indexes=(1,),
    ),
}

TOWER_WORKLOADS = {
    workload.name: workload
    for tower, config in (TOWERS | _SMALLER).items()
    for workload in [
        *(TowerWorkload(f"{tower}-{side}", (Visual(side, side),), config) for side in SIDES),
        TowerWorkload(f"{tower}-video-16x448", (Visual(448, 448, frames=16),), config),
    ]
} | {
    workload.name: workload
    for workload in [
        TowerWorkload("tower-video-8x16x448", (Visual(448, 448, frames=16),) * 8),
        TowerWorkload("tower-batch-32", _mixed_images(32, 224, 1344)),
    ]
}

# A step of fine-tuning all layers, and the losses of many of the first 8 layers.
_SHALLOW = replace(TOWERS["tower"], depth=8, fullatt_block_indexes=(7,))
TRAINED_TOWER_WORKLOADS = {
    workload.name: workload
    for workload in [
        *(
            TowerWorkload(f"tower-train-{side}", (Visual(side, side),), gradients=True)
            for side in (448, 896, 1344)
        ),
        TowerWorkload("losses-448", (Visual(448, 448),), _SHALLOW, gradients=True, steps=50),
    ]
}

# Hugging Face's own towers that are measured untouched and accelerated.
INTEGRATIONS = {
    "integration": TOWERS["tower"],
    "integration_qwen3": TOWERS["qwen3-tower"],
    "integration_qwen3_5": _SMALLER["qwen3_5_tower"],
}

INTEGRATION_WORKLOADS = {
    workload.name: workload
    for family, config in INTEGRATIONS.items()
    for workload in [
        TowerWorkload(f"{family}-{side}", (Visual(side, side),), config) for side in SIDES
    ]
}

# In vLLM, the towers that its plugin is measured in.
VLLM_TOWERS = {
    "vllm": TOWERS["tower"],
    "vllm_qwen3": TOWERS["qwen3-tower"],
    "vllm_qwen2": TOWERS["qwen2-tower"],
}

VLLM_WORKLOADS = {
    workload.name: workload
    for family, config in VLLM_TOWERS.items()
    for workload in [
        *(TowerWorkload(f"{family}-{side}", (Visual(side, side),), config) for side in SIDES),
        TowerWorkload(f"{family}-video-16x448", (Visual(448, 448, frames=16),), config),
        TowerWorkload(
            f"{family}-batch-32", _mixed_images(32, 224, 1344, config.patch_size), config
        ),
    ]
}
