"""Real input: the photographs that scikit-learn ships, as images of any size and as clips."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from compare.common.errors import UnavailableError
from compare.workloads.towers import TowerWorkload, Visual
from flax_models import ImageConfig, VisionConfig, preprocess

Inputs = tuple[np.ndarray, np.ndarray]  # pixel_values, grid_thw


def photographs() -> list[Image.Image]:
    """A temple in China and a flower, each 640 x 427 pixels.

    Raises:
        UnavailableError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_sample_images
    except ImportError:
        raise UnavailableError(
            "the photographs come with scikit-learn: pip install '.[compare]' in the clone"
        ) from None
    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


def agreement_input(config: VisionConfig, width: int | None = None) -> Inputs:
    """Both photographs in one call; their sides are no multiples of Qwen2.5-VL's window.

    Args:
        config: of the tower that gets them.
        width: pixels to shrink the first to, the second to two thirds of it; None: as they are.

    Returns:
        pixel_values fp32 [tokens, patch_dim] and grid_thw int64 [2, 3].
    """
    images = photographs()
    if width is not None:
        widths = (width, width * 2 // 3)
        images = [
            image.resize((w, w * image.height // image.width))
            for image, w in zip(images, widths, strict=True)
        ]
    return preprocess(images, _any_size(config))


def workload_input(workload: TowerWorkload) -> Inputs:
    """The photographs in turn, cut and scaled to the workload's images; clips pan across them.

    Returns:
        pixel_values fp32 [tokens, patch_dim] and grid_thw int64 [visuals, 3].
    """
    cut = zip(itertools.cycle(photographs()), workload.visuals, strict=False)
    inputs: Sequence = [_cut(image, visual) for image, visual in cut]
    pixel_values, grid_thw = preprocess(inputs, _any_size(workload.config))
    if tuple(map(tuple, grid_thw.tolist())) != workload.grid_thw:
        raise ValueError(f"{workload.name} came out as grid {grid_thw.tolist()}")
    return pixel_values, grid_thw


def _any_size(config: VisionConfig) -> ImageConfig:
    """A family's settings, with limits so wide that no workload's side is changed."""
    return replace(ImageConfig.of(config), min_pixels=1, max_pixels=1 << 24)


def _cut(image: Image.Image, visual: Visual) -> Image.Image | list[Image.Image]:
    """The largest part of an image that has the visual's shape; of a clip, one for each frame."""
    scale = min(image.height / visual.height, image.width / visual.width)
    width, height = int(scale * visual.width), int(scale * visual.height)
    across = np.linspace(0, image.width - width, visual.frames).astype(int).tolist()
    frames = [
        image.crop((x, 0, x + width, height)).resize((visual.width, visual.height)) for x in across
    ]
    return frames[0] if visual.frames == 1 else frames
