"""Both stages as a function of a data set of Ray's."""

import os

import numpy as np
import ray
from ray.data import ActorPoolStrategy, Dataset, TaskPoolStrategy

from flax_models.common.config import VisionConfig, check_name
from flax_models.common.layout import OUTPUTS
from flax_models.ray_data.patches import Preprocessing, Report, add_patches, check_column
from flax_models.ray_data.towers import TowerStage, find_loader

# What a block of patches holds, in calls: so many are divided among calls together. More would pad
# still less, and take more memory of every process.
_CALLS_OF_A_BLOCK = 4

# Blocks in an actor at once: one is computed, the next is on its way to the GPU.
THREADS = 2


def encode(
    dataset: Dataset,
    checkpoint: str | os.PathLike[str],
    image: str = "image",
    *,
    output: str = "embeddings",
    dtype: str = "bfloat16",
    store: str | None = None,
    framework: str = "flax",
    gpus: int | None = None,
    towers: int = 1,
    decoders: int | None = None,
    batch_tokens: int = 20480,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    fps: float = 2.0,
    strict: bool = False,
    report: Report | None = None,
) -> Dataset:
    """Encode the images and videos of a data set, on as many GPUs as there are.

    Nothing runs before the result is asked for. Rows come in no certain order; their other columns
    stay with them. An image has the values that it has alone in a call, but for rounding: products
    of other sizes are summed in another order.

    Args:
        dataset: rows with a column of images or videos.
        checkpoint: a directory that every node can read.
        image: the name of that column. Strings are paths that every node can read, bytes the
            content of files; a struct of "bytes" and "path" is what Hugging Face's data sets have.
        output: "embeddings", "patches" or "pooled", as of the tower.
        dtype: what the tower computes in: "bfloat16", "float16" or "float32".
        store: what is kept of embeddings and patches, "bfloat16" or "float32"; None: `dtype`, of
            float16 "float32". Pooled vectors are always float32.
        framework: "flax"; "torch", the tower of `compare.torch_tower`; or "module:function" of your
            own, as `towers.FRAMEWORKS` says.
        gpus: how many, each with an actor and a tower of its own. None: those that Ray sees.
        towers: without a GPU, how many processes have a tower on the CPU.
        decoders: at most so many processes read, decode and resize. None: as many as there are
            CPUs; Ray starts no more of them while the towers have enough to do.
        batch_tokens: patches of a call; an image with more is a call alone.
        min_pixels, max_pixels: enlarge smaller images, shrink larger ones; None: the checkpoint's.
        fps: frames to take of each second of a video.
        strict: raise for the first file that is refused.
        report: told of what is done. None: nobody, and a file that crashes its decoder's process is
            tried again without end.

    Returns:
        The rows without the image and with
        "grid_thw": int64 [3], temporal patches, rows and columns of patches;
        "timestamps": fp64 [grid_thw[0]] of a video, in seconds;
        "embeddings" (or "patches"): the bytes of [tokens, size] in `store`, "shape" its shape; with
        DeepStack "deepstack": those of [features, tokens, size]; or
        "pooled": fp32 [hidden_size];
        "error": why a file was refused, of which the others are null then.
        `rows` makes arrays of them.

    Raises:
        CheckpointError: a checkpoint that cannot be used.
        ValueError: another `output`, `dtype`, `store` or `framework`, more GPUs than Ray sees,
            limits that no image can meet, numbers below 1; a column that is not there, which as the
            data set runs is an error of Ray's, if its columns are not known before.
        ImportError: the framework is not installed.
    """
    report = report or Report()
    check_name("output", output, OUTPUTS)
    check_name("dtype", dtype, ("bfloat16", "float16", "float32"))
    store = store or stored_dtype(dtype)
    check_name("store", store, ("bfloat16", "float32"))
    find_loader(framework)
    config = VisionConfig.from_pretrained(checkpoint)
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    preprocessing = Preprocessing.of(checkpoint, dtype=dtype, fps=fps, strict=strict, **limits)
    schema = dataset.schema(fetch_if_missing=False)  # else a part would run, only to be asked
    if schema is not None:
        check_column(schema.names, image)
    actors, resources = placement(gpus, towers)
    dataset.context.target_max_block_size = _block_bytes(config, dtype, batch_tokens)
    patches = dataset.map_batches(
        add_patches,
        fn_kwargs={"image": image, "preprocessing": preprocessing, "report": report},
        batch_format="pyarrow",
        batch_size=None,
        compute=TaskPoolStrategy(decoders),
        num_cpus=1,
    )
    # What `map_batches` calls once it has refused whole blocks to GPUs, as a block may be of any
    # size. These are of so many patches.
    return patches.map_batches_internal(
        TowerStage,
        fn_constructor_kwargs={
            "framework": framework,
            "checkpoint": os.path.abspath(checkpoint),
            "dtype": dtype,
            "output": output,
            "store": store,
            "budget": batch_tokens,
            "strict": strict,
            "report": report,
        },
        batch_format="pyarrow",
        batch_size=None,
        compute=ActorPoolStrategy(
            size=actors,
            max_concurrent_calls_per_actor=THREADS,
            max_tasks_in_flight_per_actor=THREADS + 1,
            enable_true_multi_threading=True,
        ),
        **resources,
    )


def stored_dtype(dtype: str) -> str:
    """What is kept of a tower's results if nobody says it."""
    return "bfloat16" if dtype == "bfloat16" else "float32"


def placement(gpus: int | None, towers: int) -> tuple[int, dict[str, float]]:
    """How many actors have a tower, and what Ray keeps free for each.

    Raises:
        ValueError: more GPUs than there are, or fewer than none; no tower at all.
    """
    resources = ray.cluster_resources()
    there = int(resources.get("GPU", 0))
    if gpus is None:
        gpus = there
    if not 0 <= gpus <= there:
        raise ValueError(f"{gpus} GPUs were asked for, and Ray sees {there or 'none'}")
    if gpus:  # each with a core of its own, if one is left to decode
        return gpus, {"num_gpus": 1, "num_cpus": int(resources["CPU"] > gpus)}
    if towers < 1:
        raise ValueError(f"towers must be at least 1, got {towers}")
    return towers, {"num_cpus": 0}


def _block_bytes(config: VisionConfig, dtype: str, batch_tokens: int) -> int:
    """What Ray cuts the patches into: a block is a number of patches, whatever images they are."""
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
    return _CALLS_OF_A_BLOCK * batch_tokens * config.patch_dim * np.dtype(dtype).itemsize
