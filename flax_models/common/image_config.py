"""How images become patches: the numbers, by family or from a checkpoint."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from flax_models.common.config import TOO_LARGE, VisionConfig
from flax_models.common.config_json import read_json_object
from flax_models.common.errors import CheckpointError

# Where transformers writes the settings: 5 with those of the whole processor, before in a file of
# their own, which the published checkpoints have.
_PROCESSOR_FILE, IMAGE_PROCESSOR_FILE = "processor_config.json", "preprocessor_config.json"

# What `preprocess` always does, in a checkpoint's words; 3 is Pillow's number for bicubic.
_STEPS = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True),
    "resample": 3,
    "rescale_factor": 1 / 255,
}

# Our names, and those of `VisionConfig`.
_SHARED_WITH_TOWER = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}

# Our names, and those of a checkpoint's "size": areas, whatever they are called there.
_LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}

# Smaller images are enlarged to it, for which no stranger's file may ask for all memory.
_MOST_MIN_PIXELS = 1 << 26

# What `preprocess` equals, by the names that transformers has had for it.
_PROCESSOR = re.compile(r"Qwen[\d_]+VLImageProcessor(Fast|Pil)?")

Channels = tuple[float, float, float]


@dataclass(frozen=True)
class ImageConfig:
    """What `preprocess` needs to know; the defaults are Hugging Face's for Qwen2 and Qwen2.5.

    Attributes:
        min_pixels: lower limit on the pixels of a resized frame, at most 2^26.
        max_pixels: upper limit on the pixels of a resized frame.
        patch_size: pixels along a side of a patch.
        temporal_patch_size: frames of a patch.
        merge_size: patches along a side of a merge unit; sides become multiples of
            patch_size x merge_size pixels.
        image_mean: of red, green and blue, of values from 0 to 1; the default is that of CLIP's
            training images, as is `image_std`.
        image_std: their standard deviations.

    Raises:
        ValueError: limits or sizes that are not positive, `min_pixels` above `max_pixels` or 2^26,
            or channels that are not three finite numbers, deviations above 0.
    """

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_mean: Channels = (0.48145466, 0.4578275, 0.40821073)
    image_std: Channels = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        """Check every value."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} must be a positive integer, got {value!r}")
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels {self.min_pixels:,} is above max_pixels {self.max_pixels:,}"
            )
        if self.min_pixels > _MOST_MIN_PIXELS:
            raise ValueError(
                f"min_pixels must be at most {_MOST_MIN_PIXELS:,}, got {self.min_pixels:,}"
            )
        for name in ("image_mean", "image_std"):
            channels = getattr(self, name)
            if not _are_channels(channels):
                raise ValueError(
                    f"{name} must be three finite numbers, for r, g and b; got {channels!r}"
                )
            object.__setattr__(self, name, tuple(map(float, channels)))
        if min(self.image_std) <= 0:
            raise ValueError(f"image_std must be above 0, got {self.image_std}")

    @classmethod
    def of(cls, config: VisionConfig) -> Self:
        """The settings with which a family was published, for a tower of these sizes.

        For the Qwen2 and Qwen2.5 families the limits are the defaults of Hugging Face's processor.
        """
        values = dict(cls._published(config))
        for ours, theirs in _SHARED_WITH_TOWER.items():
            values[ours] = getattr(config, theirs)
        return cls(**values)

    @staticmethod
    def _published(config: VisionConfig) -> Mapping[str, Any]:
        return config.family.image_settings

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Read a checkpoint's settings; those of its family where it has no such file.

        Args:
            directory: of a checkpoint; its processor_config.json or preprocessor_config.json may
                set what its config.json does not.

        Raises:
            CheckpointError: a file that cannot be read, that asks for another image processor or
                other steps than those of `preprocess`, or for other patches than the tower's.
            ValueError: a config.json or values that nothing can be built from.
        """
        config = VisionConfig.from_pretrained(directory)
        path, settings = read_settings(Path(directory), "image_processor", IMAGE_PROCESSOR_FILE)
        if settings is None:
            return cls.of(config)
        processor = settings.get("image_processor_type")
        if processor is not None and not _PROCESSOR.fullmatch(str(processor)):
            raise CheckpointError(
                f"{path}: image_processor_type is {processor!r}; only Qwen2VLImageProcessor is done"
            )
        return cls._from_settings(path, settings, {}, config)

    @classmethod
    def _from_settings(
        cls,
        path: Path,
        settings: Mapping[str, Any],
        defaults: Mapping[str, Any],
        config: VisionConfig,
    ) -> Self:
        """Build what a checkpoint's file says, and else the defaults, for a tower."""
        for name, ours in _STEPS.items():
            if settings.get(name, ours) not in (ours, None):
                raise CheckpointError(f"{path}: {name} is {settings[name]!r}; only {ours} is done")
        try:
            names = [field.name for field in fields(cls)]
            read = cls(**{**defaults, **_values(settings, names)})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        for ours, theirs in _SHARED_WITH_TOWER.items():
            if getattr(read, ours) != getattr(config, theirs):
                raise CheckpointError(
                    f"{path}: {ours} is {getattr(read, ours)}, but the tower's {theirs} "
                    f"is {getattr(config, theirs)}"
                )
        return read


def read_settings(directory: Path, name: str, *files: str) -> tuple[Path, dict[str, Any] | None]:
    """Settings of a processor and their file; None where the checkpoint has none.

    Args:
        directory: of the checkpoint.
        name: of the processor, among the settings of the whole one.
        files: which may hold its settings alone, the first that is there.
    """
    path = directory / _PROCESSOR_FILE
    settings = read_json_object(path).get(name) if path.is_file() else None
    if settings is not None:
        if not isinstance(settings, dict):
            raise CheckpointError(f"'{name}' in {path} is not a JSON object")
        return path, settings
    path = next((directory / file for file in files if (directory / file).is_file()), path)
    return path, read_json_object(path) if path.name in files else None


def _values(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Arguments by these names: what is stated, limits by themselves or else in "size"."""
    stated = {name: value for name, value in settings.items() if value is not None}
    values = {name: stated[name] for name in names if name in stated}
    edges = {name: edge for name, edge in _LIMITS.items() if name not in values}
    if "size" not in stated or not edges:
        return values
    size = stated["size"]
    if not isinstance(size, dict) or any(size.get(edge) is None for edge in edges.values()):
        raise ValueError(f"size must have {' and '.join(edges.values())}, got {size!r}")
    return values | {name: size[edge] for name, edge in edges.items()}


def _are_channels(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(isinstance(number, int | float) and abs(number) < TOO_LARGE for number in value)
    )
