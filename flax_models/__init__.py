"""Vision towers in Flax NNX, and what a tower of any framework needs.

Importing this package imports NumPy but neither JAX nor PyTorch: the tower itself is imported when
one of its names is first used.

- `common`: what both towers share, in NumPy alone.
- `tower`: the Flax tower, of the layers in `blocks`, their `attention`, matrix `products`, the
  `gated` activation and `gated_product`, and of `pooling` over an image.
- Around a pass: `inputs` and `device` bring patches there, `compiled` calls it with small
  parameters `packed`, `rows` takes the images' own rows of what comes out.
- `mesh`: a tower on several devices, whole images on each or its blocks divided.
- `ray_data`: data sets of any size, on Ray Data.
- `__main__`: the command line, `python -m flax_models`, with values by `arguments`.
"""

from typing import Any

from flax_models.common.buckets import Bucket, choose_bucket
from flax_models.common.checkpoint import read_checkpoint
from flax_models.common.config import VisionConfig
from flax_models.common.errors import CheckpointError, ImageError
from flax_models.common.image_config import ImageConfig
from flax_models.common.images import preprocess
from flax_models.common.layout import Layout, plan_layout, rotary_angles
from flax_models.common.video_config import VideoConfig
from flax_models.common.videos import preprocess_videos

__all__ = [
    "Bucket",
    "CheckpointError",
    "ImageConfig",
    "ImageError",
    "Layout",
    "VideoConfig",
    "VisionConfig",
    "VisionTower",
    "choose_bucket",
    "encode",
    "load_vision_tower",
    "plan_layout",
    "preprocess",
    "preprocess_videos",
    "read_checkpoint",
    "rotary_angles",
    "save_vision_tower",
]

_OF_THE_TOWER = ("VisionTower", "encode", "load_vision_tower", "save_vision_tower")


def __getattr__(name: str) -> Any:
    """Import the tower, and with it JAX, when one of its names is first used (PEP 562)."""
    if name not in _OF_THE_TOWER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from flax_models import tower
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("jax", "jaxlib", "flax"):
            raise
        raise ImportError(
            f"flax_models.{name} needs JAX and Flax: pip install '.[jax]' in the clone"
        ) from error
    return getattr(tower, name)


def __dir__() -> list[str]:
    """Name the tower's functions beside what is already imported."""
    return sorted({*globals(), *_OF_THE_TOWER})
