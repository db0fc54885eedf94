"""The Qwen-VL vision towers in PyTorch, the twin of `flax_models.tower`.

Built from the same arrays, with the same call; for inference, or to be trained. On a GPU
`torch.compile` fuses what lies between the matrix products and the attention, and each bucket's
pass is recorded once as a CUDA graph.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from compare.torch_tower.attention import FRAME_ATTENTION, check_provider, layout_segments
from compare.torch_tower.blocks import Block, LateNormBlock, PatchEmbed, PatchMerger, PositionTable
from compare.torch_tower.device import as_array, as_tensor, find_device, free_memory
from compare.torch_tower.graphs import GraphCache, first_rows
from compare.torch_tower.inputs import layout_tensors, patches_tensor
from compare.torch_tower.pooling import segment_means
from flax_models import Layout, VisionConfig, choose_bucket, plan_layout, read_checkpoint
from flax_models.common.buckets import (
    Bucket,
    bucket_of_equal_frames,
    check_token_buckets,
    exact_bucket,
)
from flax_models.common.checkpoint import write_checkpoint
from flax_models.common.config import check_head_dim, check_name
from flax_models.common.finite import non_finite_images
from flax_models.common.grid import as_grid
from flax_models.common.memory import check_memory
from flax_models.common.weights import published_tensors, tower_parameters
from triton_kernels.attend import runs_kernel
from triton_kernels.checks import IMPLEMENTATIONS

# With DeepStack also the features of some blocks.
Embeddings = torch.Tensor | tuple[torch.Tensor, tuple[torch.Tensor, ...]]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Every elementwise kernel gets the first of the launches that Inductor knows, eight elements a
# thread. Left to tune, it would keep the fastest at the first call's size for all sizes to come: a
# small image cannot tell them apart, and at 9,216 tokens the first has a speedup of 1.5.
COMPILER_OPTIONS = {"triton.autotune_pointwise": False}
_VARIANTS = 256  # of one compiled function that a process may have; 8 by default


class VisionTower(nn.Module):
    """A vision tower; `load_vision_tower` makes one that holds a checkpoint's weights.

    Parameters are as `tower_weights` rearranges a checkpoint's, padding included, whose gradients
    are exactly 0.

    Attributes:
        config: the tower's configuration.
        implementation, batch_invariant: of the attention, as in `triton_kernels`.
        frame_attention: what attends over whole frames, one of `attention.FRAME_ATTENTION`;
            after a change, `graphs.clear()` has to follow.
        token_buckets: padded token counts that calls choose from; None: the ladder of
            `choose_bucket`.
        trainable: whether calls record gradients. Parameters are the published ones then.
        gradient_checkpointing: whether a backward pass runs each block again instead of keeping
            what is in it.
        graphs: the recorded passes; None: kernels are launched one by one.
        is_compiled: whether `torch.compile` fuses parts of it, see `compile_parts`.
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        implementation: str = "auto",
        batch_invariant: bool = False,
        frame_attention: str = "fused",
        token_buckets: Sequence[int] | None = None,
        trainable: bool = False,
        gradient_checkpointing: bool = False,
    ) -> None:
        """Build a tower with random weights.

        Raises:
            ValueError: a head_dim that is no multiple of 8 up to 256, bad `token_buckets`, an
                unknown `implementation` or `frame_attention`, or one that is not trainable; whether
                that can run here, `load_vision_tower` finds out.
        """
        super().__init__()
        check_head_dim(config)
        check_name("implementation", implementation, IMPLEMENTATIONS)
        check_name("frame_attention", frame_attention, FRAME_ATTENTION)
        if batch_invariant and frame_attention != "fused":
            raise ValueError(
                f"batch_invariant=True needs frame_attention='fused', got {frame_attention!r}"
            )
        if trainable and frame_attention != "fused":
            raise ValueError(
                f"trainable=True needs frame_attention='fused', got {frame_attention!r}"
            )
        self.config = config
        self.implementation = implementation
        self.batch_invariant = batch_invariant
        self.frame_attention = frame_attention
        self.token_buckets = check_token_buckets(config, token_buckets)
        self.trainable = trainable
        self.gradient_checkpointing = gradient_checkpointing
        self.graphs: GraphCache | None = None
        self.is_compiled = False
        self.patch_embed = PatchEmbed(config)
        has_table = config.num_position_embeddings is not None
        self.position_table = PositionTable(config) if has_table else None
        block = LateNormBlock if config.family.late_norm and not trainable else Block
        self.blocks = nn.ModuleList([block(config) for _ in range(config.depth)])
        self.merger = PatchMerger(config)
        self.deepstack_mergers = nn.ModuleList(
            [PatchMerger(config, norm_merged=True) for _ in config.deepstack_visual_indexes]
        )
        self.register_load_state_dict_post_hook(VisionTower._forget_graphs)

    def compile_parts(self) -> None:
        """Have `torch.compile` fuse what is in a block, and the interpolation of positions."""
        # All towers of a process share its limit of variants, beyond which nothing is compiled: a
        # block takes two for each dtype, size, device and grad mode.
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _VARIANTS)
        for part in (*self.blocks, self.position_table):
            if part is not None:
                part.compile(dynamic=True, options=COMPILER_OPTIONS)
        self.is_compiled = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Compile a copy, or what was pickled, as the original was: PyTorch leaves that out."""
        super().__setstate__(state)
        if self.is_compiled:
            self.compile_parts()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.patch_embed.proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters, activations and embeddings; in fp16 `product_bias` of an MLP is fp32."""
        return self.patch_embed.proj.weight.dtype

    def forward(
        self, pixel_values: Any, grid_thw: Any, *, output: str = "embeddings"
    ) -> Embeddings:
        """Encode images and clips, all in one call.

        For inference, without recording gradients and in the tower's dtype whatever autocast says;
        a trainable tower goes by the caller's modes of both.

        The first call of each bucket and output records a CUDA graph, where there are graphs. What
        is written to the parameters takes effect, and so do `to` and `load_state_dict`; after a
        parameter is replaced by other means, or a module, `graphs.clear()` has to follow. A hook of
        a module is called while a graph is recorded, not when it is replayed.

        Args:
            pixel_values: [tokens, patch_dim] floating, the patches of all images as `preprocess`
                returns them: a tensor on any device, or an array. From the host they are uploaded
                while the GPU works on the calls before, and may be written to afterwards; of up to
                three calls they take memory then, in their own dtype.
            grid_thw: [images, 3] integers: frames, rows and columns of each image in patches. On
                the GPU it costs a synchronisation.
            output: "embeddings", "patches" or "pooled", as of the twin.

        Returns:
            Embeddings [tokens / merge_unit, out_hidden_size] in `dtype` on `device`, or from a
            tower with DeepStack (embeddings, features); for "patches" [tokens, hidden_size], for
            "pooled" [images, hidden_size]; all as the twin returns them.

        Raises:
            ValueError, TypeError, MemoryError: where the twin raises them.
            RuntimeError: the caller records a CUDA graph, and the layout of `grid_thw` is not on
                the GPU yet; record `encode` of what `prepare` returned before.
        """
        grid, bucket = self._choose_bucket(grid_thw)
        recorded = self.graphs is not None and self.graphs.takes(bucket.tokens, self.device)
        # Padding makes recordings few; without one it would only be work.
        if not recorded and self.token_buckets is None:
            bucket = exact_bucket(self.config, grid)
        layout = self._plan(grid, bucket, output)
        patches = self._patches(pixel_values, layout)
        if recorded:
            weight = self.patch_embed.proj.weight
            return self.graphs(functools.partial(encode, self), patches, layout, weight)
        return first_rows(encode(self, *self._place(patches, layout)), layout.num_outputs)

    def non_finite_images(
        self, result: Embeddings, grid_thw: Any, *, output: str = "embeddings"
    ) -> list[int]:
        """Ask which images of a call came out with infinities or NaN; no call looks by itself.

        Args, result and errors are those of the twin. This waits for the result and reads it once,
        on its device.
        """
        embeddings, features = result if isinstance(result, tuple) else (result, ())
        each = torch.stack([rows.isfinite().all(dim=1) for rows in (embeddings, *features)])
        finite = each.all(dim=0).cpu().numpy()
        return non_finite_images(self.config, host_grid(grid_thw), finite, output)

    def prepare(
        self, pixel_values: Any, grid_thw: Any, *, output: str = "embeddings"
    ) -> tuple[torch.Tensor, Layout]:
        """Pad a call's input to its bucket and bring it to `device`, as the input of `encode`.

        Args and errors are those of a call.

        Returns:
            The patches padded with zeros, [bucket.tokens, patch_dim], and the layout with tensors
            for arrays. The first `layout.num_outputs` rows of what `encode` makes of them are the
            output.
        """
        layout = self._plan(*self._choose_bucket(grid_thw), output)
        patches = self._patches(pixel_values, layout)
        return self._place(patches, layout)

    def _choose_bucket(self, grid_thw: Any) -> tuple[np.ndarray, Bucket]:
        """The grid, checked and on the host, and the bucket that it fits in."""
        grid = as_grid(self.config, host_grid(grid_thw))
        return grid, choose_bucket(self.config, grid, self.token_buckets)

    def _plan(self, grid: np.ndarray, bucket: Bucket, output: str) -> Layout:
        dtype = _name(self.dtype)
        check_memory(self.config, bucket.tokens, dtype, lambda: free_memory(self.device))
        if self.frame_attention == "cudnn":
            bucket = bucket_of_equal_frames(grid, bucket, pad_one=False)
        return plan_layout(self.config, grid, bucket, output)

    def _patches(self, pixel_values: Any, layout: Layout) -> torch.Tensor:
        if isinstance(pixel_values, torch.Tensor) and not self.trainable:
            pixel_values = pixel_values.detach()
        return patches_tensor(self.config, pixel_values, layout, self.device)

    def _place(self, patches: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        padding = len(layout.window_order) - len(patches)
        padded = F.pad(patches.to(self.device), (0, 0, 0, padding))
        return padded, layout_tensors(layout, self.device)

    def _forget_graphs(self, *_: Any) -> None:
        if self.graphs is not None:
            self.graphs.clear()

    def _apply(self, *arguments: Any, **keywords: Any) -> Self:
        """What `to`, `half` and their like come down to: parameters move."""
        self._forget_graphs()
        return super()._apply(*arguments, **keywords)

    @torch.no_grad()
    def hidden_states(self, pixel_values: Any, grid_thw: Any) -> Iterator[torch.Tensor]:
        """Run block by block, to compare with another tower after each.

        Args and errors are those of a call.

        Yields:
            The hidden state after each block, [tokens, hidden_size] in `dtype`, without padding,
            in window order: the order in which Hugging Face's blocks return theirs too.
        """
        patches, layout = self.prepare(pixel_values, grid_thw)
        hidden_states = _block_outputs(self, patches, layout)
        for _ in self.blocks:
            with _without_autocast(self):  # but not while the caller has the state before
                hidden = next(hidden_states)
            yield hidden[: layout.num_tokens].clone()  # the next block may write into it


def load_vision_tower(
    directory: str | os.PathLike[str],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    *,
    implementation: str = "auto",
    batch_invariant: bool = False,
    frame_attention: str = "fused",
    token_buckets: Sequence[int] | None = None,
    trainable: bool = False,
    gradient_checkpointing: bool = False,
    compile: bool | None = None,
    cuda_graphs: bool | None = None,
    progress: bool | None = None,
) -> VisionTower:
    """Load a tower from a checkpoint in Hugging Face's format.

    Args:
        directory: of a vision tower, or of a whole vision-language model, of which only the tower
            is read.
        dtype: bfloat16, float16 or float32; the checkpoint's own dtype does not matter. What
            loading computes is held as that needs; `to` another dtype later rounds it too.
        device: where the tower lives. None: the GPU if there is one, else the CPU.
        implementation, batch_invariant: of the attention, as in `triton_kernels`.
        frame_attention: what attends over whole frames: "fused", our kernel; "fa2", PyTorch's own
            flash attention; "fa3", if installed; "cudnn", which takes only calls with frames of one
            length, padded by whole frames. All but the first take bfloat16 and float16 on a GPU.
        token_buckets: padded token counts that calls choose from. None: a ladder that pads little
            and records seldom, see `choose_bucket`; calls that are not recorded are not padded.
        trainable: hold the published parameters, which `save_vision_tower` writes, and record
            their gradients, and those of patches that want one. `frame_attention` is "fused" then.
            For inference Qwen2.5-VL's MLPs have other parameters, which are faster.
        gradient_checkpointing: let a backward pass keep the input of each block alone and run the
            block again: less memory for more time.
        compile: have `torch.compile` fuse what lies between the matrix products and the attention
            of a block, and the interpolation of positions. The first call compiles for every image
            size to come. Raises PyTorch's limit of variants, as each tower takes some. None: on a
            GPU.
        cuda_graphs: record a CUDA graph for each bucket in use, the last 16 of them. None: where
            the kernels run; the reference asks the GPU for values, which no graph can. Not of a
            trainable tower.
        progress: show progress on standard error. None: only where that is a terminal.

    Raises:
        CheckpointError: a checkpoint that cannot be used, see `read_checkpoint`.
        ValueError: an unknown model type, dtype, `implementation` or `frame_attention`, bad
            `token_buckets`, no such device, one that `frame_attention` does not run on, CUDA
            graphs where they cannot be recorded, or a trainable tower with either.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}")
    if cuda_graphs and trainable:
        raise ValueError(
            "cuda_graphs=True needs trainable=False: no gradients are recorded in them"
        )
    target = find_device(device)
    on_gpu = target.type == "cuda"
    if cuda_graphs and not on_gpu:
        raise ValueError(f"cuda_graphs=True needs a tower on a CUDA GPU, got device '{target}'")
    recordable = runs_kernel(target, implementation) and on_gpu
    if cuda_graphs and not recordable:
        raise ValueError(f"cuda_graphs=True needs the kernels, got {implementation=}")
    cuda_graphs = recordable and not trainable if cuda_graphs is None else cuda_graphs
    compile = on_gpu if compile is None else compile
    config = VisionConfig.from_pretrained(directory)
    with torch.device("meta"):  # no parameter is allocated before its values are there
        tower = VisionTower(
            config,
            implementation=implementation,
            batch_invariant=batch_invariant,
            frame_attention=frame_attention,
            token_buckets=token_buckets,
            trainable=trainable,
            gradient_checkpointing=gradient_checkpointing,
        )
    check_provider(frame_attention, config, dtype, target)
    tensors = read_checkpoint(config, directory, progress)
    parameters = {
        name: as_tensor(parameter).to(target)
        for name, parameter in tower_parameters(config, tensors, _name(dtype), trainable)
    }
    tower.load_state_dict(parameters, assign=True)
    if compile:
        tower.compile_parts()
    if cuda_graphs:
        tower.graphs = GraphCache()
    return tower.requires_grad_(trainable).eval()


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
    parameters = {name: as_array(parameter) for name, parameter in tower.named_parameters()}
    write_checkpoint(tower.config, published_tensors(tower.config, parameters), directory)


def host_grid(grid_thw: Any) -> Any:
    """`grid_thw` where NumPy can read it."""
    return grid_thw.detach().cpu() if isinstance(grid_thw, torch.Tensor) else grid_thw


def _name(dtype: torch.dtype) -> str:
    """A dtype as NumPy names it."""
    return str(dtype).removeprefix("torch.")


def encode(tower: VisionTower, pixel_values: torch.Tensor, layout: Layout) -> Embeddings:
    """Encode patches: what a call does after `VisionTower.prepare`, on the device alone.

    Args:
        tower: the tower.
        pixel_values: [tokens, patch_dim] floating, on the tower's device; rows of padding may hold
            any finite values.
        layout: as `layout_tensors` returns it for the tower's device; it may be padded to a bucket.
            (`VisionTower.prepare` returns both.)

    Returns:
        What a call does for `layout.output`, of a padded layout with rows behind the images' first
        `layout.num_outputs` that mean nothing.

    Raises:
        ValueError: `pixel_values` have another shape than the layout asks for, or the layout has
            frames that the tower's `frame_attention` cannot take.
    """
    if tower.trainable:
        return run_pass(tower, pixel_values, layout)
    with torch.no_grad(), _without_autocast(tower):
        return run_pass(tower, pixel_values, layout)


def run_pass(tower: VisionTower, pixel_values: torch.Tensor, layout: Layout) -> Embeddings:
    """`encode` in the caller's modes of autograd and autocast."""
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


def _without_autocast(tower: VisionTower) -> torch.autocast:
    """Where a pass is in the tower's dtype: not in autocast's, which a recording would keep."""
    return torch.autocast(tower.device.type, enabled=False)


def _block_outputs(
    tower: VisionTower, pixel_values: torch.Tensor, layout: Layout
) -> Iterator[torch.Tensor]:
    """Yield the hidden state after each block, [tokens, hidden_size] in window order.

    It may be overwritten when the next is asked for.
    """
    config = tower.config
    expected = (len(layout.window_order), config.patch_dim)
    if pixel_values.shape != expected:
        raise ValueError(
            f"pixel_values must have the layout's shape {list(expected)}, "
            f"got {list(pixel_values.shape)}"
        )
    options = tower.implementation, tower.frame_attention, tower.batch_invariant
    windows, frames = layout_segments(config, layout, *options)
    hidden = _embed(tower, pixel_values, layout)
    if tower.trainable:
        normed, next_norms = None, [None] * len(tower.blocks)
    else:
        first_norm, *next_norms = (*(block.norm1 for block in tower.blocks), nn.Identity())
        normed = first_norm(hidden)
    again = tower.gradient_checkpointing and torch.is_grad_enabled()
    for index, (block, next_norm) in enumerate(zip(tower.blocks, next_norms, strict=True)):
        segments = frames if config.sees_frames(index) else windows
        layer = functools.partial(_run_again, block) if again else block
        hidden, normed = layer(hidden, normed, segments, next_norm)
        yield hidden


# Nothing in a block is random.
_run_again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def _embed(tower: VisionTower, pixel_values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What the first block gets, [tokens, hidden_size] in window order."""
    hidden = tower.patch_embed(pixel_values[layout.window_order])
    if tower.position_table is None:
        return hidden
    learned = tower.position_table(layout.positions, layout.frame_sizes)
    return (hidden + learned).to(hidden.dtype)  # in fp32, rounded once
