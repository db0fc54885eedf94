"""How clips become patches: the numbers of Hugging Face's two processors of videos."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from flax_models.common.config import VisionConfig
from flax_models.common.errors import CheckpointError
from flax_models.common.image_config import IMAGE_PROCESSOR_FILE, ImageConfig, read_settings

_VIDEO_PROCESSOR_FILE = "video_preprocessor_config.json"

Processor = Literal["Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"]

# What a file means that leaves a value out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2VLVideoProcessor": {},
    "Qwen3VLVideoProcessor": {
        "min_pixels": 128 * 32 * 32,
        "max_pixels": 768 * 32 * 32,
        "patch_size": 16,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "do_sample_frames": True,
        "fps": 2,
        "max_video_tokens": 768,
    },
}


@dataclass(frozen=True)
class VideoConfig(ImageConfig):
    """What `preprocess_videos` needs to know; the defaults are Hugging Face's for Qwen2-VL.

    Attributes:
        min_pixels: lower limit on the pixels of a resized frame; with Qwen3VLVideoProcessor of all
            frames of a clip together.
        max_pixels: upper limit, likewise.
        patch_size, temporal_patch_size, merge_size, image_mean, image_std: as in `ImageConfig`.
        processor: whose rules; Qwen2-VL, Qwen2.5-VL and the Omni models have
            Qwen2VLVideoProcessor's, Qwen3-VL and Qwen3.5 Qwen3VLVideoProcessor's.
        do_sample_frames: frames are sampled even where a call does not ask for it.
        fps: frames that are then sampled of each second.
        num_frames: frames that are then sampled of each clip, instead of `fps`.
        min_frames: the least that sampling by `fps` takes, if there are so many.
        max_frames: the most that it takes.
        cap_pixels_per_frame: lower `max_pixels` by `max_video_tokens`, as the option of this name
            does in Hugging Face's processors, where it is off too unless a checkpoint says it.
        max_video_tokens: with Qwen2VLVideoProcessor the tokens of a whole clip, of which 9 in 10
            are for its frames; with Qwen3VLVideoProcessor those of one frame.

    Raises:
        ValueError: as of `ImageConfig`; another processor, both `fps` and `num_frames`, or one of
            them that is not above 0.
    """

    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    processor: Processor = "Qwen2VLVideoProcessor"
    do_sample_frames: bool = False
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 128_000

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        if self.processor not in get_args(Processor):
            raise ValueError(
                f"processor must be {' or '.join(get_args(Processor))}, got {self.processor!r}"
            )
        check_sampling(self.fps, self.num_frames)

    @staticmethod
    def _published(config: VisionConfig) -> Mapping[str, Any]:
        settings = config.family.video_settings
        return _DEFAULTS[settings.get("processor", VideoConfig.processor)] | settings

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Read a checkpoint's settings; those of its family where it has no such file.

        Of an Omni model the limits are always those of its family: transformers' processor of the
        whole model has its own.

        Args:
            directory: of a checkpoint; its processor_config.json, video_preprocessor_config.json or
                preprocessor_config.json may set what its config.json does not, the first that does.

        Raises:
            CheckpointError: a file that cannot be read, that asks for another processor or other
                steps than those of `preprocess_videos`, or for other patches than the tower's.
            ValueError: a config.json or values that nothing can be built from.
        """
        config = VisionConfig.from_pretrained(directory)
        files = _VIDEO_PROCESSOR_FILE, IMAGE_PROCESSOR_FILE
        path, settings = read_settings(Path(directory), "video_processor", *files)
        if settings is None:
            return cls.of(config)
        published = cls._published(config)
        processor = settings.get("video_processor_type") or published.get(
            "processor", cls.processor
        )
        if processor not in get_args(Processor):
            raise CheckpointError(
                f"{path}: video_processor_type is {processor!r}; only "
                f"{' and '.join(get_args(Processor))} are done"
            )
        defaults, ignored = _DEFAULTS[processor], set()
        if processor == "Qwen3VLVideoProcessor":  # which knows them by "size" alone
            ignored = {"min_pixels", "max_pixels"}
        if config.family.fixed_video_limits:
            ignored = {"min_pixels", "max_pixels", "size"}
            defaults = defaults | {name: published[name] for name in ignored & set(published)}
        stated = {name: value for name, value in settings.items() if name not in ignored}
        return cls._from_settings(path, stated | {"processor": processor}, defaults, config)


def check_sampling(fps: float | None, num_frames: int | None) -> None:
    """Check how many frames are asked for.

    Raises:
        ValueError: both are given, or one that is not above 0.
    """
    if fps is not None and num_frames is not None:
        raise ValueError(f"give fps or num_frames, not both; got {fps} and {num_frames}")
    if fps is not None and not is_rate(fps):
        raise ValueError(f"fps must be a finite number above 0, got {fps!r}")
    if num_frames is not None and (not isinstance(num_frames, int) or num_frames < 1):
        raise ValueError(f"num_frames must be a positive integer, got {num_frames!r}")


def is_rate(value: Any) -> bool:
    """Whether something can be a number of frames a second."""
    return isinstance(value, int | float) and 0 < value < math.inf
