"""A vision tower's tensors in a Hugging Face checkpoint, read and written as NumPy arrays.

Both towers are built from these arrays. Of a whole vision-language model only the vision tensors
are read, and every one of them is checked before the first is.
"""

import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ml_dtypes  # noqa: F401  (importing it teaches NumPy, and so safetensors, bfloat16)
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from flax_models.common.config import VisionConfig
from flax_models.common.config_json import read_json_object
from flax_models.common.errors import CheckpointError
from flax_models.common.families import FAMILIES, Family
from flax_models.common.finite import is_finite

__all__ = ["CheckpointError", "expected_tensors", "read_checkpoint", "write_checkpoint"]

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_CONFIG_FILE = "config.json"

# How the tower's tensors are named in a tower alone, in a whole model as published, and in one
# whose names are those of the modules of newer libraries; the same in an Omni model.
_PREFIXES = ("", "visual.", "model.visual.", "thinker.visual.", "thinker.model.visual.")
_TOP_LEVEL = (
    *("patch_embed.", "blocks.", "merger.", "pos_embed."),
    *(f"{family.deepstack}." for family in FAMILIES.values() if family.deepstack),
)

# Names of a whole model that can only be a vision tower's.
_OF_VISION = tuple(prefix + part for prefix in _PREFIXES[1:] for part in _TOP_LEVEL)

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # safetensors' names, NumPy's


def expected_tensors(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Name every tensor of a vision tower, as Hugging Face does without a prefix, and its shape.

    Linear layers are [out_features, in_features]; the patch embedding is
    [hidden_size, in_channels, temporal_patch_size, patch_size, patch_size].
    """
    family, hidden, mlp = config.family, config.hidden_size, config.intermediate_size
    patch = (config.temporal_patch_size, config.patch_size, config.patch_size)
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (hidden, config.in_channels, *patch)
    }
    if family.patch_bias:
        shapes["patch_embed.proj.bias"] = (hidden,)
    if config.num_position_embeddings is not None:
        shapes["pos_embed.weight"] = (config.num_position_embeddings, hidden)
    for block in range(config.depth):
        shapes |= {
            **_norm(family, f"blocks.{block}.norm1", hidden),
            **_norm(family, f"blocks.{block}.norm2", hidden),
            **_linear(f"blocks.{block}.attn.proj", hidden, hidden),
        }
        inputs = family.attention_inputs
        for name in inputs:
            shapes |= _linear(f"blocks.{block}.attn.{name}", 3 * hidden // len(inputs), hidden)
        for name in family.mlp_inputs:
            shapes |= _linear(f"blocks.{block}.mlp.{name}", mlp, hidden)
        shapes |= _linear(f"blocks.{block}.mlp.{family.mlp_output}", hidden, mlp)
    merged = hidden * config.merge_unit
    mergers = {"merger": hidden} | {
        f"{family.deepstack}.{index}": merged
        for index in range(len(config.deepstack_visual_indexes))
    }
    norm, first, second = family.merger
    for merger, normed in mergers.items():
        shapes |= {
            **_norm(family, f"{merger}.{norm}", normed),
            **_linear(f"{merger}.{first}", merged, merged),
            **_linear(f"{merger}.{second}", config.out_hidden_size, merged),
        }
    return shapes


def read_checkpoint(
    config: VisionConfig, directory: str | os.PathLike[str], progress: bool | None = False
) -> dict[str, np.ndarray]:
    """Read a vision tower's tensors.

    Args:
        config: the tower's configuration.
        directory: holds model.safetensors, or model.safetensors.index.json and the files it names;
            of a vision tower alone, or of a whole vision-language model.
        progress: show a progress bar on standard error. None: only where that is a terminal.

    Returns:
        Arrays under the names and with the shapes of `expected_tensors`, in the dtype in which
        they are stored: float32, float16 or ml_dtypes.bfloat16.

    Raises:
        CheckpointError: a missing directory or file; a damaged or truncated file; an index that
            names a file of another directory; a tensor that is missing, has another shape than the
            configuration asks for, another dtype, or infinities or NaN; a vision tensor that the
            configuration knows nothing of, or that two names or an index and its files disagree
            about.
    """
    directory = Path(directory)
    with ExitStack() as stack:
        stored_in = _locate(directory, stack)
        shapes = expected_tensors(config)
        prefix = _find_prefix(directory, stored_in, shapes)
        _check_names(directory, stored_in, prefix, shapes)
        for file in dict.fromkeys(stored_in[prefix + name] for name in shapes):
            file.check_index(stored_in)
        nbytes = {
            name: stored_in[prefix + name].check(prefix + name, shape)
            for name, shape in shapes.items()
        }
        with _progress_bar(sum(nbytes.values()), progress) as bar:
            tensors = {}
            for name in shapes:
                tensors[name] = stored_in[prefix + name].read(prefix + name)
                bar.advance(bar.task_ids[0], nbytes[name])
    return tensors


def write_checkpoint(
    config: VisionConfig, tensors: Mapping[str, np.ndarray], directory: str | os.PathLike[str]
) -> None:
    """Write a vision tower alone, as Hugging Face's `save_pretrained` does.

    Args:
        config: the tower's configuration.
        tensors: arrays as `read_checkpoint` returns them.
        directory: is made where there is none; gets model.safetensors and config.json.

    Raises:
        FileExistsError: the directory holds a checkpoint, maybe of a whole model.
        OSError: it cannot be made or written to.
        ValueError: a tensor holds infinities or NaN, or the configuration cannot be written.
    """
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ValueError(f"the tensor {name!r} holds infinities or NaN: nothing is written")
    values = config.to_json() | {"dtype": next(iter(tensors.values())).dtype.name}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name in (_SINGLE_FILE, _INDEX_FILE, _CONFIG_FILE):
        if (directory / name).exists():
            raise FileExistsError(f"{directory} holds a checkpoint, its {name}: name another")
    # Of a part of an array safetensors would write the wrong memory.
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    with (directory / _SINGLE_FILE).open("xb") as file:
        file.write(save(whole, metadata={"format": "pt"}))  # without it transformers refuses
    (directory / _CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


class _File:
    """A safetensors file, opened on first use and closed with the stack."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._stack = stack
        self._content = None

    @property
    def content(self) -> safe_open:
        if self._content is None:
            if not self.path.is_file():
                raise CheckpointError(f"no such checkpoint file: {self.path}")
            if not os.access(self.path, os.R_OK):  # safetensors would say that it is not there
                raise CheckpointError(f"no permission to read the checkpoint file {self.path}")
            try:
                self._content = self._stack.enter_context(safe_open(self.path, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{self.path} is damaged or truncated, not a safetensors file: {error}"
                ) from None
        return self._content

    def check_index(self, stored_in: Mapping[str, "_File"]) -> None:
        """Refuse a vision tensor here that the index does not look for here.

        transformers reads all that the files hold, and of two tensors of one name the last.
        """
        names = self.content.keys()
        for name in names:
            if name.startswith(_OF_VISION) and stored_in.get(name) is not self:
                raise CheckpointError(
                    f"{self.path} holds the tensor {name!r}, which the index has elsewhere or not"
                )

    def check(self, name: str, shape: tuple[int, ...]) -> int:
        """Hold a tensor to its expected shape and to the known dtypes; return its bytes."""
        try:
            stored = self.content.get_slice(name)
        except SafetensorError:
            raise CheckpointError(
                f"{self.path} lacks the tensor {name!r} that the index says it holds"
            ) from None
        if tuple(stored.get_shape()) != shape:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} has shape {stored.get_shape()}; "
                f"the configuration asks for {list(shape)}"
            )
        if stored.get_dtype() not in _DTYPES:
            raise CheckpointError(
                f"tensor {name!r} in {self.path} is {stored.get_dtype()}; "
                f"expected {', '.join(_DTYPES)}"
            )
        return int(np.prod(shape)) * np.dtype(_DTYPES[stored.get_dtype()]).itemsize

    def read(self, name: str) -> np.ndarray:
        tensor = self.content.get_tensor(name)
        if not is_finite(tensor):
            raise CheckpointError(f"tensor {name!r} in {self.path} holds infinities or NaN")
        return tensor


def _locate(directory: Path, stack: ExitStack) -> dict[str, _File]:
    """Map every tensor's stored name to its file; opens no file that an index describes."""
    if not directory.is_dir():
        raise CheckpointError(f"no such checkpoint directory: {directory}")
    single, index = directory / _SINGLE_FILE, directory / _INDEX_FILE
    if single.is_file():
        file = _File(single, stack)
        return dict.fromkeys(file.content.keys(), file)
    if not index.is_file():
        raise CheckpointError(f"{directory} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}")
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index} is damaged, it needs a 'weight_map' from tensors to files")
    for name in names.values():
        # A checkpoint has no business with other files of its reader.
        if name in ("", "..") or Path(name).name != name or "\0" in name:
            raise CheckpointError(f"{index} names {name!r}, which is no file of its own directory")
    files = {name: _File(directory / name, stack) for name in set(names.values())}
    return {name: files[file] for name, file in names.items()}


def _find_prefix(directory: Path, stored: Iterable[str], expected: Container[str]) -> str:
    """The prefix under which the tower's tensors are stored.

    Of a tensor stored under two, transformers' class of a whole Qwen2.5-VL and that of one without
    a head read different ones, and its class of a tower alone a third: nobody can tell which is
    meant.
    """
    examples: dict[str, str] = {}
    for name in stored:
        for prefix in _PREFIXES:
            if name.startswith(prefix) and name[len(prefix) :] in expected:
                examples.setdefault(prefix, name)
    if not examples:
        raise CheckpointError(
            f"{directory} holds no vision tower: no tensor such as 'visual.patch_embed.proj.weight'"
        )
    if len(examples) > 1:
        names = " and ".join(repr(examples[prefix]) for prefix in _PREFIXES if prefix in examples)
        raise CheckpointError(
            f"{directory} holds tensors of its vision tower by more than one prefix, {names}: "
            f"keep those of one"
        )
    return next(iter(examples))


def _check_names(
    directory: Path, stored: Iterable[str], prefix: str, expected: Iterable[str]
) -> None:
    """Refuse a tower that lacks a tensor, or that has one which would silently be left out."""
    stored = set(stored)
    missing = [prefix + name for name in expected if prefix + name not in stored]
    if missing:
        raise CheckpointError(f"{directory} lacks {_some(missing)}")
    wanted = {prefix + name for name in expected}
    vision = *_OF_VISION, *(prefix + part for part in _TOP_LEVEL)
    unknown = sorted(name for name in stored - wanted if name.startswith(vision))
    if unknown:
        raise CheckpointError(
            f"{directory} holds {_some(unknown)}, which its configuration knows nothing of"
        )


def _some(names: list[str]) -> str:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the tensor {names[0]!r}{others}"


def _linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(family: Family, name: str, features: int) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias") if family.norm == "layer" else ("weight",)
    return {f"{name}.{part}": (features,) for part in parts}


@contextmanager
def _progress_bar(total_bytes: int, visible: bool | None) -> Iterator[Progress]:
    columns = (TextColumn("reading weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    shown = console.is_terminal if visible is None else visible
    console.quiet = not shown  # before 14.3 rich ends a line even where the bar is disabled
    with Progress(*columns, console=console, disable=not shown) as bar:
        bar.add_task("", total=total_bytes)
        yield bar
