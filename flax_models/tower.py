"""The Qwen-VL vision towers in Flax NNX: patches in, embeddings for the language model out.

Patches are put in window order once at the entrance, embeddings back in Hugging Face's order once
at the exit; no block permutes. Shapes are those of a bucket and everything else about the images is
data, so one compilation serves every mix of images and clips that fits the bucket.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from flax_models.attention import FRAME_ATTENTION, Segments, check_provider, layout_segments
from flax_models.blocks import Block, LateNormBlock, PatchEmbed, PatchMerger, PositionTable
from flax_models.common.buckets import bucket_of_equal_frames, check_token_buckets, choose_bucket
from flax_models.common.checkpoint import read_checkpoint, write_checkpoint
from flax_models.common.config import VisionConfig, check_head_dim, check_name
from flax_models.common.finite import is_finite, non_finite_images
from flax_models.common.layout import Layout, plan_layout
from flax_models.common.memory import check_memory
from flax_models.common.weights import published_tensors, tower_parameters
from flax_models.compiled import Jitted, compiled
from flax_models.device import arrived, find_device, free_memory, home_device
from flax_models.inputs import on_device, pad_patches
from flax_models.pooling import segment_means
from flax_models.rows import first_rows
from pallas_kernels.checks import IMPLEMENTATIONS

# With DeepStack also the features of some blocks.
Embeddings = jax.Array | tuple[jax.Array, tuple[jax.Array, ...]]

_DTYPES = ("bfloat16", "float16", "float32")


class VisionTower(nnx.Module):
    """A vision tower; `load_vision_tower` makes one that holds a checkpoint's weights.

    Parameters are as `tower_weights` rearranges a checkpoint's, padding included, whose gradients
    are exactly 0. Qwen2.5-VL's are the published ones only in a trainable tower: to train others is
    to leave the architecture.

    Attributes:
        config: the tower's configuration.
        dtype: of parameters, activations and embeddings; in fp16 an MLP's `product_bias` is fp32.
        implementation, batch_invariant: of the attention, as in `pallas_kernels`.
        frame_attention: what attends over whole frames, one of `attention.FRAME_ATTENTION`.
        token_buckets: padded token counts that calls choose from; None: the ladder of
            `choose_bucket`.
        remat: whether a backward pass computes each block again instead of keeping what is in it.
    """

    def __init__(
        self,
        config: VisionConfig,
        dtype: DTypeLike = jnp.bfloat16,
        *,
        implementation: str = "auto",
        batch_invariant: bool = False,
        frame_attention: str = "fused",
        token_buckets: Sequence[int] | None = None,
        trainable: bool = False,
        remat: bool = False,
    ) -> None:
        """Build a tower with placeholder weights, zeros and ones.

        Raises:
            ValueError: a dtype other than bfloat16, float16 and float32, a head_dim that is no
                multiple of 8 up to 256, bad `token_buckets`, an unknown `implementation` or
                `frame_attention`; whether that can run here, `load_vision_tower` finds out.
        """
        self.config = config
        self.dtype = _known_dtype(dtype)
        check_head_dim(config)
        check_name("implementation", implementation, IMPLEMENTATIONS)
        check_name("frame_attention", frame_attention, FRAME_ATTENTION)
        if batch_invariant and frame_attention != "fused":
            raise ValueError(
                f"batch_invariant=True needs frame_attention='fused', got {frame_attention!r}"
            )
        self.implementation = implementation
        self.batch_invariant = batch_invariant
        self.frame_attention = frame_attention
        self.token_buckets = check_token_buckets(config, token_buckets)
        self.remat = remat
        self.patch_embed = PatchEmbed(config, self.dtype)
        has_table = config.num_position_embeddings is not None
        self.position_table = PositionTable(config, self.dtype) if has_table else None
        block = LateNormBlock if config.family.late_norm and not trainable else Block
        self.blocks = nnx.List([block(config, self.dtype) for _ in range(config.depth)])
        self.merger = PatchMerger(config, self.dtype)
        self.deepstack_mergers = nnx.List(
            [
                PatchMerger(config, self.dtype, norm_merged=True)
                for _ in config.deepstack_visual_indexes
            ]
        )

    def __call__(
        self, pixel_values: ArrayLike, grid_thw: ArrayLike, *, output: str = "embeddings"
    ) -> Embeddings:
        """Encode images and clips, all in one call of one compiled function.

        The first call of each bucket compiles; `encode` is the same under a `jax.jit` of your own.
        Whatever is changed about the tower between calls takes effect: parameters' values, whole
        parameters or modules, attributes.

        Args:
            pixel_values: [tokens, patch_dim] floating, the patches of all images as `preprocess`
                returns them. A NumPy array is padded on the host; a `jax.Array` that does not
                fill its bucket is padded by a small function that is compiled for each number of
                tokens. Either is waited for until it is on the device, see `device.arrived`; a
                `jax.Array` that is still computed there makes the call wait for all before it.
            grid_thw: [images, 3] integers: frames, rows and columns of each image in patches.
            output: one of `layout.OUTPUTS`; each compiles for itself. "embeddings": the language
                model's. "patches": the encoder's own features, the hidden states that the merger,
                and its norm, would get. "pooled": their mean over each image or clip.

        Returns:
            Embeddings [tokens / merge_unit, out_hidden_size] in `dtype`, in Hugging Face's order:
            image after image, in each frame after frame, in each row after row of merge units.
            They are committed to the tower's device where it lives on one. Whether they are finite
            `non_finite_images` tells.
            A tower with DeepStack, Qwen3-VL's or Qwen3-Omni's, returns (embeddings, features): in a
            tuple the features of each block of `deepstack_visual_indexes`, of the embeddings' shape
            and order.
            For "patches" one array [tokens, hidden_size] in raster order: image after image, in
            each frame after frame, in each row after row of patches. For "pooled" one array
            [images, hidden_size], summed in fp32.

        Raises:
            ValueError: a bad grid, more tokens than the largest bucket, `pixel_values` that do
                not match the grid, an unknown `output`, or frames that `frame_attention` cannot
                take.
            TypeError: `pixel_values` are not floating-point.
            MemoryError: a pass over so many tokens does not fit in what memory is free.
        """
        patches, layout = self.prepare(pixel_values, grid_thw, output=output)
        outputs = compiled(_encode, self)(*self._on_device(patches, layout))
        return jax.tree.map(lambda rows: first_rows(rows, layout.num_outputs), outputs)

    def non_finite_images(
        self, result: Embeddings, grid_thw: ArrayLike, *, output: str = "embeddings"
    ) -> list[int]:
        """Ask which images of a call came out with infinities or NaN; no call looks by itself.

        In fp16 they do where activations pass its range, as the published towers' do for some
        images. This waits for the result and reads it once, on the host.

        Args:
            result: what the call returned.
            grid_thw, output: what it was given.

        Returns:
            The images' numbers, from 0; none if all of the result is finite.

        Raises:
            ValueError: a bad grid, one of another number of rows, or an unknown `output`.
        """
        finite = [is_finite(np.asarray(rows), axis=1) for rows in jax.tree.leaves(result)]
        return non_finite_images(self.config, grid_thw, np.logical_and.reduce(finite), output)

    def prepare(
        self, pixel_values: ArrayLike, grid_thw: ArrayLike, *, output: str = "embeddings"
    ) -> tuple[np.ndarray | jax.Array, Layout]:
        """Pad a call's input to its bucket, which makes it the input of `encode`.

        Args and errors are those of a call. A `jax.Array` is waited for; what is padded on the host
        stays there, as does the layout.

        Returns:
            The patches padded with zeros, [bucket.tokens, patch_dim], and the layout. The first
            `layout.num_outputs` rows of what `encode` makes of them are the output.
        """
        bucket = choose_bucket(self.config, grid_thw, self.token_buckets)
        weight = self.patch_embed.proj.weight
        check_memory(self.config, bucket.tokens, self.dtype, lambda: free_memory(weight))
        if self.frame_attention == "cudnn":
            bucket = bucket_of_equal_frames(grid_thw, bucket, pad_one=True)
        layout = plan_layout(self.config, grid_thw, bucket, output)
        return pad_patches(self.config, pixel_values, layout), layout

    def hidden_states(self, pixel_values: ArrayLike, grid_thw: ArrayLike) -> Iterator[jax.Array]:
        """Run block by block, to compare with another tower after each.

        Args and errors are those of a call.

        Yields:
            The hidden state after each block, [tokens, hidden_size] in `dtype`, without padding,
            in window order: the order in which Hugging Face's blocks return theirs too.
        """
        patches, layout = self.prepare(pixel_values, grid_thw)
        for hidden in _block_outputs(self, *self._on_device(patches, layout)):
            yield hidden[: layout.num_tokens]

    def _on_device(
        self, patches: np.ndarray | jax.Array, layout: Layout
    ) -> tuple[jax.Array, Layout]:
        return on_device(patches, layout, home_device(self.patch_embed.proj.weight))


def _known_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        known = jnp.dtype(dtype)
    except TypeError:  # "bf16" or a torch.dtype
        known = None
    if known is None or known.name not in _DTYPES:
        given = dtype if known is None else known.name
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {given}")
    return known


def load_vision_tower(
    directory: str | os.PathLike[str],
    dtype: DTypeLike = jnp.bfloat16,
    *,
    device: jax.Device | str | None = None,
    implementation: str = "auto",
    batch_invariant: bool = False,
    frame_attention: str = "fused",
    token_buckets: Sequence[int] | None = None,
    trainable: bool = False,
    remat: bool = False,
    progress: bool | None = None,
) -> VisionTower:
    """Load a tower from a checkpoint in Hugging Face's format.

    Args:
        directory: of a vision tower, or of a whole vision-language model, of which only the tower
            is read.
        dtype: bfloat16, float16 or float32; the checkpoint's own dtype does not matter.
        device: where the tower lives: a JAX device, or a platform's name such as "cuda" for its
            first device. None: JAX's default device.
        implementation, batch_invariant: of the attention, as in `pallas_kernels`.
        frame_attention: what attends over whole frames: "fused", our kernel, or "cudnn". That
            takes bfloat16 and float16 on a GPU, and calls with one image, or with frames of one
            length whose padding is a whole number of frames; each number of frames compiles.
        token_buckets: padded token counts that calls choose from. None: a ladder that pads little
            and compiles seldom, see `choose_bucket`.
        trainable: hold the published parameters, which `save_vision_tower` writes; for inference
            Qwen2.5-VL's MLPs have others, which are faster.
        remat: let a backward pass keep the input of each block alone and compute the block again
            (`jax.checkpoint`): less memory for more time.
        progress: show progress on standard error. None: only where that is a terminal.

    Raises:
        CheckpointError: a checkpoint that cannot be used, see `read_checkpoint`.
        ValueError: an unknown model type, dtype, `implementation` or `frame_attention`, bad
            `token_buckets`, no such device, or one that `frame_attention` does not run on.
    """
    target = find_device(device)
    config = VisionConfig.from_pretrained(directory)
    # Only the shapes: no parameter is allocated before its values are there.
    tower = nnx.eval_shape(
        lambda: VisionTower(
            config,
            dtype,
            implementation=implementation,
            batch_invariant=batch_invariant,
            frame_attention=frame_attention,
            token_buckets=token_buckets,
            trainable=trainable,
            remat=remat,
        )
    )
    check_provider(frame_attention, config, tower.dtype, target)
    tensors = read_checkpoint(config, directory, progress)
    paths = {_dotted(path): path for path, _ in nnx.to_flat_state(nnx.state(tower))}
    parameters = arrived(
        {
            paths[name]: jax.device_put(parameter, target)
            for name, parameter in tower_parameters(config, tensors, tower.dtype, trainable)
        }
    )
    nnx.update(tower, nnx.from_flat_state(parameters))
    return tower


def save_vision_tower(tower: VisionTower, directory: str | os.PathLike[str]) -> None:
    """Write a trainable tower as Hugging Face's `save_pretrained` writes its own: the tower alone.

    Args:
        tower: loaded with `trainable=True`; families other than Qwen2.5-VL's may be without.
        directory: is made where there is none; gets model.safetensors, in the parameters' dtype,
            and config.json.

    Raises:
        FileExistsError: the directory holds a checkpoint, maybe of a whole model.
        OSError: it cannot be made or written to.
        ValueError: other parameters than the published ones, such as an adapter's; some that are
            not finite, or not 0 where they are padded; a `norm_eps` of its own.
    """
    state = nnx.to_flat_state(nnx.state(tower, nnx.Param))
    parameters = {_dotted(path): np.asarray(parameter[...]) for path, parameter in state}
    write_checkpoint(tower.config, published_tensors(tower.config, parameters), directory)


def _dotted(path: tuple[Any, ...]) -> str:
    """A parameter's path as `tower_weights` names it."""
    return ".".join(map(str, path))


def encode(tower: VisionTower, pixel_values: jax.Array, layout: Layout) -> Embeddings:
    """Encode padded patches: a pure function, for a `jax.jit` of your own.

    All three arguments are pytrees. The tower's leaves are its parameters; a function of those
    alone is `lambda params, ...: encode(nnx.merge(graphdef, params), ...)`. The layout's arrays are
    data, its two bounds and its output static, so one compilation serves all layouts of one bucket
    and output. A call
    of the tower compiles by `compiled.COMPILER_OPTIONS`, which a `jax.jit` may be given too, and
    waits until its arguments are on the device, see `device.arrived`.

    Args:
        tower: the tower.
        pixel_values: [bucket.tokens, patch_dim] floating; rows of padding may hold any finite
            values.
        layout: as `plan_layout` returns it, padded to the same bucket. (`VisionTower.prepare`
            returns both.)

    Returns:
        What a call does for `layout.output`, each array with rows for all of the bucket:
        tokens / merge_unit of embeddings, tokens of patches, frames of pooled ones. The first
        `layout.num_outputs` are the images', the others mean nothing.

    Raises:
        ValueError: `pixel_values` have another shape than the layout asks for, or the layout has
            frames that the tower's `frame_attention` cannot take.
    """
    merged = layout.output == "embeddings"
    indexes = tower.config.deepstack_visual_indexes if merged else ()
    features = []
    for index, hidden in enumerate(_block_outputs(tower, pixel_values, layout)):
        if index in indexes:
            merger = tower.deepstack_mergers[indexes.index(index)]
            features.append(merger(hidden)[layout.output_order])
    if layout.output == "pooled":
        return segment_means(hidden, layout.cu_image_seqlens)
    if layout.output == "patches":
        return hidden[layout.output_order]
    embeddings = tower.merger(hidden)[layout.output_order]
    return (embeddings, tuple(features)) if indexes else embeddings


def _encode(tower: VisionTower, pixel_values: jax.Array, layout: Layout) -> Embeddings:
    """`encode`, into memory that is the results' alone from the start.

    Left to itself XLA has arrays that die early share it, and records anew every command of a CUDA
    graph that touches memory which has moved, as results do while the caller holds the last ones:
    most commands of a pass whose results are as large as the residual stream.
    """
    results, tree = jax.tree.flatten(jax.eval_shape(encode, tower, pixel_values, layout))
    # Of unlike values, or XLA would make one array of them.
    places = [jnp.full_like(result, index) for index, result in enumerate(results)]
    pixel_values, places = jax.lax.optimization_barrier((pixel_values, places))
    results = jax.tree.leaves(encode(tower, pixel_values, layout))
    return tree.unflatten(map(_written, places, results))


def _written(place: jax.Array, result: jax.Array) -> jax.Array:
    """The result, in two parts: XLA would take a whole one for the array itself."""
    half = len(result) // 2
    place = jax.lax.dynamic_update_slice_in_dim(place, result[:half], 0, axis=0)
    return jax.lax.dynamic_update_slice_in_dim(place, result[half:], half, axis=0)


# Traced for windows and for frames instead of once for each layer.
@Jitted
def _run_block(block: Block | LateNormBlock, hidden: jax.Array, segments: Segments) -> jax.Array:
    return block(hidden, segments)


_run_block_again = Jitted(jax.checkpoint(_run_block.__wrapped__))


def _block_outputs(
    tower: VisionTower, pixel_values: jax.Array, layout: Layout
) -> Iterator[jax.Array]:
    """Yield the hidden state after each block, [bucket.tokens, hidden_size] in window order."""
    config = tower.config
    expected = (len(layout.window_order), config.patch_dim)
    if pixel_values.shape != expected:
        raise ValueError(
            f"pixel_values must have the layout's padded shape {list(expected)}, "
            f"got {list(pixel_values.shape)}"
        )
    options = tower.implementation, tower.frame_attention, tower.batch_invariant
    windows, frames = layout_segments(config, layout, *options)
    hidden = _embed(tower, pixel_values, layout)
    run_block = _run_block_again if tower.remat else _run_block
    for index, block in enumerate(tower.blocks):
        segments = frames if config.sees_frames(index) else windows
        hidden = run_block(block, hidden, segments)
        yield hidden


def _embed(tower: VisionTower, pixel_values: jax.Array, layout: Layout) -> jax.Array:
    """What the first block gets, [tokens, hidden_size] in window order."""
    hidden = tower.patch_embed(pixel_values[layout.window_order])
    if tower.position_table is None:
        return hidden
    learned = tower.position_table(layout.positions, layout.frame_sizes)
    return (hidden.astype(jnp.float32) + learned).astype(hidden.dtype)  # rounded once
