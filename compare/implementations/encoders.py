"""Ways to encode a folder of photographs: our command, the tower alone, and what others have.

Each takes a `Job`, gives pooled vectors, and runs in processes of its own: one for each GPU, or
those of Ray.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from compare.common.console import number, say
from compare.common.errors import UnavailableError
from compare.common.processes import begin_together, on_each_gpu
from compare.implementations import huggingface
from compare.implementations.towers import JaxTower, TorchTower, Tower
from compare.workloads.arrays import torch_device
from compare.workloads.scale import Sizes
from flax_models import ImageConfig, preprocess

_WARM_UP = 512  # files that a first run of the command encodes, by which programs are compiled
_PASSES = 5  # over the sample, at least; of those that are one by one exactly
_LINES = 10  # seconds between the command's lines of progress
_LOOP_IMAGES = 8  # of a call of Hugging Face's tower


@dataclass(frozen=True)
class Job:
    """What is to be encoded.

    Attributes:
        files: all photographs, which lie in one folder.
        checkpoint: a tower's directory.
        scratch: a folder for what is written meanwhile.
        gpus: as of `ScaleWorkload`.
        sizes: what else was asked for.
    """

    files: Sequence[Path]
    checkpoint: Path
    scratch: Path
    gpus: int
    sizes: Sizes

    @property
    def sample(self) -> Sequence[Path]:
        """The files that are taken where all would take too long."""
        return self.files[: self.sizes.sample]

    @property
    def checked(self) -> Sequence[Path]:
        """The files whose vectors are kept."""
        return self.files[: self.sizes.checked]


@dataclass(frozen=True)
class Encoded:
    """What encoding showed.

    Attributes:
        images, patches: how many were encoded.
        seconds: in which; of several passes the median.
        vectors: of the checked files, fp32 [files, hidden_size], as they came out of it.
        stages: seconds of a core or of a GPU for a photograph, by one of `STAGES`.
        padding: patches beside, by which calls were padded.
        compile_s: the seconds before, in which programs were compiled.
        peak_memory_mib: of a GPU, None where it is not known.
        busy: the share of the seconds in which the towers were in a call.
        reading: seconds of a core for a photograph's decoding and patches, beside all else.
    """

    images: int
    patches: int
    seconds: float
    vectors: np.ndarray
    stages: dict[str, float] = field(default_factory=dict)
    padding: int | None = None
    compile_s: float | None = None
    peak_memory_mib: float | None = None
    busy: float | None = None
    reading: float | None = None


@dataclass(frozen=True)
class Encoder:
    """A named way to encode.

    Attributes:
        name: as in tables and result files.
        framework: of its tower.
        run: raises UnavailableError or ImportError with the reason where it cannot run here.
        ours: whether what is timed is ours.
        alone: of our command, the name of what its tower reaches alone.
    """

    name: str
    framework: str
    run: Callable[[Job], Encoded]
    ours: bool = False
    alone: str | None = None


def baseline() -> Encoder:
    """A loop as people write it, over Hugging Face's processor and model."""
    return Encoder("Hugging Face loop", "torch", partial(_together, _loop))


def encoders(name: str) -> list[Encoder]:
    """Our tower alone in "flax" or "torch", our command with it, and vLLM."""
    framework = {"flax": "jax", "torch": "torch"}[name]
    alone = f"{name} tower alone"
    return [
        Encoder(alone, framework, partial(_together, _alone, name), ours=True),
        Encoder(name, framework, partial(_command, name), ours=True, alone=alone),
        Encoder("vLLM, encoder only", "torch", _vllm),
    ]


def exact(job: Job) -> dict[bool, np.ndarray]:
    """The checked files' vectors by Hugging Face's tower in true fp32.

    Of patches by our `preprocess` and, under False, by Hugging Face's processor, whose arithmetic
    is Pillow's where torchvision is not installed.
    """
    (vectors,) = on_each_gpu(min(job.gpus, 1), _exact, job)
    return vectors


def write_checkpoint(job: Job) -> None:
    """Write a random checkpoint, in another process: what that takes of a GPU is given back."""
    on_each_gpu(min(job.gpus, 1), huggingface.random_checkpoint, job.checkpoint, job.sizes.config)


def _together(function: Callable[..., Encoded], *arguments: Any) -> Encoded:
    """What a function of a job did on all GPUs at once; the job is the last argument."""
    *_, job = arguments
    each = on_each_gpu(job.gpus, function, *arguments)
    images = sum(encoded.images for encoded in each)
    return replace(
        each[0],
        images=images,
        patches=sum(encoded.patches for encoded in each),
        padding=sum(encoded.padding or 0 for encoded in each),
        # That in which the sum of their rates encodes them all.
        seconds=images / sum(encoded.images / encoded.seconds for encoded in each),
    )


def _exact(job: Job) -> dict[bool, np.ndarray]:
    config = ImageConfig.from_pretrained(job.checkpoint)
    processor = huggingface.image_processor(job.checkpoint)
    ours = [preprocess(path, config) for path in job.checked]
    theirs = [_processed(processor, [_decoded(path)]) for path in job.checked]
    with huggingface.true_fp32():
        model = huggingface.load(job.checkpoint, torch.float32)
        return {
            mine: np.concatenate([_pooled(model, *_put(*each)) for each in patches])
            for mine, patches in ((True, ours), (False, theirs))
        }


class _Clock:
    """The seconds of each stage, summed."""

    def __init__(self) -> None:
        self.seconds: Counter = Counter()
        self.start()

    def start(self) -> None:
        self._last = time.perf_counter()

    def stop(self, stage: str) -> None:
        """Add what went by since the last stop to a stage."""
        before, self._last = self._last, time.perf_counter()
        self.seconds[stage] += self._last - before

    def of_each(self, images: int) -> dict[str, float]:
        return {stage: seconds / images for stage, seconds in self.seconds.items()}


def _loop(job: Job) -> Encoded:
    processor = huggingface.image_processor(job.checkpoint)
    model = huggingface.load(job.checkpoint, torch.bfloat16)
    memory = TorchTower(model)
    memory.reset_peak_memory()
    batches = [
        job.sample[start : start + _LOOP_IMAGES]
        for start in range(0, len(job.sample), _LOOP_IMAGES)
    ]
    start = time.perf_counter()
    _hugging_face(processor, model, batches[0], _Clock())
    compile_s = time.perf_counter() - start
    begin_together()
    clock = _Clock()
    results = [_hugging_face(processor, model, batch, clock) for batch in batches]
    return Encoded(
        images=len(job.sample),
        patches=sum(patches for _, patches in results),
        seconds=sum(clock.seconds.values()),
        vectors=np.concatenate([vectors for vectors, _ in results])[: len(job.checked)],
        stages=clock.of_each(len(job.sample)),
        padding=0,
        compile_s=compile_s,
        peak_memory_mib=memory.peak_memory_mib(),
    )


def _hugging_face(
    processor: Any, model: torch.nn.Module, files: Sequence[Path], clock: _Clock
) -> tuple[np.ndarray, int]:
    """The vectors of some files, encoded in one call, and how many patches they have."""
    clock.start()
    images = [_decoded(path) for path in files]
    clock.stop("decode")
    patches = _processed(processor, images)
    clock.stop("patches")
    arguments = _put(*patches)
    clock.stop("upload")
    vectors = _pooled(model, *arguments)
    clock.stop("tower")
    return vectors, len(arguments[0])


def _processed(processor: Any, images: Sequence[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = processor(images=list(images), return_tensors="pt")
    return inputs["pixel_values"], inputs["image_grid_thw"]


def _put(*patches: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixel values and grid on the GPU if there is one."""
    values, grid_thw = (torch.as_tensor(each).to(torch_device()) for each in patches)
    return values, grid_thw


def _pooled(
    model: torch.nn.Module, pixel_values: torch.Tensor, grid_thw: torch.Tensor
) -> np.ndarray:
    return huggingface.pooled(model, pixel_values, grid_thw).cpu().numpy()


def _decoded(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def _alone(name: str, job: Job) -> Encoded:
    """Our tower on patches in the host's memory, by as many threads as the command has."""
    from flax_models.common.buckets import choose_bucket
    from flax_models.ray_data.calls import call_buckets, plan_calls
    from flax_models.ray_data.patches import Preprocessing
    from flax_models.ray_data.pipeline import THREADS
    from flax_models.ray_data.towers import find_loader

    preprocessing = Preprocessing.of(job.checkpoint, dtype="bfloat16", fps=1.0)
    clock = _Clock()
    for path in job.sample:
        _decoded(path)
    clock.stop("decode")
    patches, grids = zip(*(preprocessing(str(path))[:2] for path in job.sample), strict=True)
    clock.stop("patches")  # and decoding once more
    clock.seconds["patches"] -= clock.seconds["decode"]
    grids = np.array(grids)
    tokens = grids.prod(axis=1)
    calls = plan_calls(tokens.tolist(), job.sizes.batch_tokens)
    inputs = [(np.concatenate([patches[n] for n in call]), grids[call]) for call in calls]
    device: Tower = {"flax": JaxTower, "torch": TorchTower}[name](None)
    device.reset_peak_memory()
    buckets = call_buckets(job.sizes.config, job.sizes.batch_tokens)
    encode = find_loader(name)(str(job.checkpoint), "bfloat16", buckets)

    def pooled(call: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        return np.float32(encode(*call, "pooled")[0])

    def upload(call: tuple[np.ndarray, np.ndarray]) -> None:
        device.wait(device.put(*call)[0])

    start = time.perf_counter()
    for _ in range(2):  # a graph is recorded behind the first call of a size
        _seconds(map(pooled, inputs))
    compile_s = time.perf_counter() - start
    begin_together()
    passes: list[float] = []
    with ThreadPoolExecutor(THREADS) as pool:
        # What a size compiles later still is in the first passes, and not in the median one.
        while len(passes) < _PASSES or sum(passes) < job.sizes.seconds:
            start = time.perf_counter()
            results = list(pool.map(pooled, inputs))
            passes.append(time.perf_counter() - start)
    uploading, calling = (
        min(_seconds(map(step, inputs)) for _ in range(_PASSES)) for step in (upload, pooled)
    )
    clock.seconds.update(upload=uploading, tower=calling - uploading)
    in_order = np.argsort(np.concatenate(calls))
    padded = sum(
        choose_bucket(job.sizes.config, grid_thw, buckets).tokens for _, grid_thw in inputs
    )
    return Encoded(
        images=len(tokens),
        patches=int(tokens.sum()),
        seconds=statistics.median(passes),
        vectors=np.concatenate(results)[in_order][: len(job.checked)],
        stages=clock.of_each(len(tokens)),
        padding=int(padded - tokens.sum()),
        compile_s=compile_s,
        peak_memory_mib=device.peak_memory_mib(),
    )


def _seconds(calls: Iterable[object]) -> float:
    """Those that it takes to go through calls that are made one by one."""
    start = time.perf_counter()
    for _ in calls:
        pass
    return time.perf_counter() - start


def _command(framework: str, job: Job) -> Encoded:
    """`python -m flax_models encode`, after it has compiled its programs over some of the files."""
    from flax_models.ray_data import read

    some = job.scratch / "warm-up.txt"
    some.write_text("\n".join(map(str, job.files[:_WARM_UP])), encoding="utf-8")
    start = time.perf_counter()
    _run_command(job, framework, some, job.scratch / f"{framework}-warm-up")
    compile_s = time.perf_counter() - start
    say(f"the command's first run, over {_WARM_UP} photographs: {number(compile_s)} s")
    out = job.scratch / framework
    counted = _run_command(job, framework, job.files[0].parent, out)
    checked = {path.name: None for path in job.checked}
    checked |= {row["id"]: row["pooled"] for row in read(out) if row["id"] in checked}
    return Encoded(
        images=int(counted["images"]),
        patches=int(counted["patches"]),
        seconds=counted["seconds"],
        vectors=np.stack(list(checked.values())),
        stages={"writing": counted["writing"] / counted["written"]},
        padding=int(counted["padding"]),
        compile_s=compile_s,
        busy=counted["busy"] / (counted["seconds"] * max(job.gpus, 1)),
        reading=counted["reading"] / counted["read"],
    )


def _run_command(job: Job, framework: str, source: Path, out: Path) -> dict[str, float]:
    """Run it; returns what its manifest says of the run."""
    options = {
        "checkpoint": job.checkpoint,
        "out": out,
        "framework": framework,
        "output": "pooled",
        "batch-tokens": job.sizes.batch_tokens,
        "gpus": job.gpus,
        "every": _LINES,
    }
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "flax_models", "encode", str(source), *given]
    last = ""
    # Of a run that is cut off, its lines tell how far it was.
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr or ():
            last = line.strip() or last
            say(f"  {last}")
    if process.returncode:
        raise RuntimeError(last or "the command failed")
    return json.loads((out / "manifest.json").read_text(encoding="utf-8"))["last_run"]


def _vllm(job: Job) -> Encoded:
    if importlib.util.find_spec("vllm") is None:
        raise UnavailableError("vLLM is not installed")
    raise UnavailableError(
        f"vLLM {metadata.version('vllm')} encodes in whole models alone, and the random "
        "checkpoint here is a tower's"
    )
