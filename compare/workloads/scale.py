"""Folders of photographs: what `python -m flax_models encode` is measured on."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from compare.common import environment
from compare.workloads.photographs import photographs
from flax_models import VisionConfig

# What a photograph goes through: on cores the first two and the last, the others on a GPU.
STAGES = ("decode", "patches", "upload", "tower", "writing")

_SHAPES = ((4, 3), (3, 2), (16, 9), (1, 1), (3, 4), (2, 3), (9, 16))
_LEAST_CUT = 0.5  # of the side of a shipped photograph; less would be a blur
_QUALITY = 90


@dataclass(frozen=True)
class ScaleWorkload:
    """The folder, our towers in one framework, and all that is compared to them.

    Attributes:
        framework: "flax" or "torch".
        gpus: with a tower on each; 0: one on the CPU.
    """

    name: str
    framework: str
    gpus: int


SCALE_WORKLOADS = {
    workload.name: workload
    for gpus, told in ((1, "1-gpu"), (2, "2-gpus"))
    for framework in ("flax", "torch")
    for workload in [ScaleWorkload(f"photographs-{framework}-{told}", framework, gpus)]
}


@dataclass(frozen=True)
class Sizes:
    """How large the folder is, and what is made of it.

    Attributes:
        photographs: files in the folder.
        pixels: of the smallest photograph and of the largest.
        sample: of the first files, which are enough where all would take too long.
        checked: of the first files, whose vectors are held to those in fp32.
        batch_tokens: patches of a call.
        seconds: for which a tower alone is timed.
        config: the tower's.
    """

    photographs: int = 20_000
    pixels: tuple[int, int] = (300_000, 2_800_000)
    sample: int = 128
    checked: int = 8
    batch_tokens: int = 20480
    seconds: float = 5.0
    config: VisionConfig = field(default_factory=VisionConfig.qwen2_5_vl_7b)


def write_photographs(
    folder: Path, count: int, pixels: tuple[int, int], seed: int = 0
) -> list[Path]:
    """Write JPEG files that are cut from the shipped photographs and scaled, all different.

    Args:
        folder: where they go, which is made.
        count: how many; the first ones are the same for any number.
        pixels: of the smallest and of the largest, between which areas are spread evenly.
        seed: of what is cut, and to which size it is scaled.

    Returns:
        The files in order.

    Raises:
        UnavailableError: scikit-learn is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shipped = photographs()

    def write(number: int) -> Path:
        path = folder / f"{number:06}.jpg"
        random = np.random.default_rng((seed, number))
        _draw(random, shipped, pixels).save(path, quality=_QUALITY)
        return path

    with ThreadPoolExecutor(environment.cores()) as pool:  # Pillow scales and encodes beside Python
        return list(pool.map(write, range(count)))


def _draw(
    random: np.random.Generator, shipped: list[Image.Image], pixels: tuple[int, int]
) -> Image.Image:
    image = shipped[random.integers(len(shipped))]
    wide, high = _SHAPES[random.integers(len(_SHAPES))]
    unit = min(image.width / wide, image.height / high) * random.uniform(_LEAST_CUT, 1)
    cut = int(unit * wide), int(unit * high)
    left, top = (random.integers(room + 1) for room in np.subtract(image.size, cut))
    side = (random.uniform(*pixels) / (wide * high)) ** 0.5
    box = (left, top, left + cut[0], top + cut[1])
    return image.resize((round(side * wide), round(side * high)), box=tuple(map(int, box)))
