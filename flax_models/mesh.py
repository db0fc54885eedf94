"""A tower on several devices of a JAX mesh: whole images on each, or its heads and MLPs divided.

Many images are divided among devices, each of which has all parameters (`ImagesOverMesh`, and for a
`jax.jit` of one's own `prepare_shares` and `encode_shares`). For one huge image it is the blocks
that are divided (`split_tower`): each device has some heads and some channels of each MLP.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from flax_models.attention import Segments
from flax_models.blocks import Block, LateNormBlock, Linear, SummedProduct
from flax_models.common.buckets import Bucket, bucket_of_tokens, choose_bucket
from flax_models.common.grid import as_grid
from flax_models.common.layout import Layout, output_rows, plan_layout
from flax_models.common.memory import check_memory
from flax_models.compiled import compiled
from flax_models.device import free_memory, upload
from flax_models.inputs import checked_patches
from flax_models.products import product
from flax_models.rows import first_rows
from flax_models.tower import Embeddings, VisionTower, encode

# Of a block's parameters those that are divided: the axis of whole heads or channels, and how many
# parts lie along it one behind the other, q, k and v, or gate and up.
_DIVIDED = {
    "attn.qkv.weight": (0, 3),
    "attn.qkv.bias": (0, 3),
    "attn.proj.weight": (1, 1),
    "mlp.up.weight": (0, 1),
    "mlp.up.bias": (0, 1),
    "mlp.gate_up.weight": (0, 2),
    "mlp.gate_up.bias": (0, 2),
    "mlp.product_bias": (0, 2),
    "mlp.bias": (0, 2),
    "mlp.down.weight": (1, 1),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shares:
    """Images divided among devices: the input of `encode_shares`, a pytree.

    The first axis of every array is the devices', so that one sharding serves them all.

    Attributes:
        patches: [devices, bucket.tokens, patch_dim], padded with zeros.
        layout: of each device's images, all padded to one bucket.
        order: [devices, rows] int32; `in_the_images_order = rows_of_all_devices[order.ravel()]`.
    """

    patches: np.ndarray
    layout: Layout
    order: np.ndarray

    @property
    def num_outputs(self) -> int:
        """Rows of the output that are not padding; of shares on the host."""
        return int(self.layout.num_outputs.sum())


def prepare_shares(
    tower: VisionTower,
    pixel_values: ArrayLike,
    grid_thw: ArrayLike,
    devices: int,
    *,
    output: str = "embeddings",
) -> Shares:
    """Divide images among devices, to each about as many patches, on the host.

    The largest go first, each to the device with the fewest patches so far. All devices' patches
    are padded to one bucket, that of the device with the most. A device without an image, where
    there are fewer than devices, gets a blank one.

    Args and errors are those of a call of the tower, and:

    Args:
        devices: how many there are along the mesh's axis.

    Returns:
        Shares in NumPy arrays; `jax.device_put(shares, NamedSharding(mesh, PartitionSpec(axis)))`
        brings each device its own.

    Raises:
        ValueError: a tower with `frame_attention="cudnn"` or a split one, or less than one device.
    """
    config = tower.config
    _check_tower(tower)
    if devices < 1:
        raise ValueError(f"devices must be at least 1, got {devices}")
    grid = as_grid(config, grid_thw)
    tokens = grid.prod(axis=1)
    pixel_values = np.asarray(checked_patches(config, pixel_values, int(tokens.sum())))
    owned = _divide(tokens, devices)
    blank = [[1, config.spatial_merge_size, config.spatial_merge_size]]
    grids = [grid[images] if len(images) else np.array(blank) for images in owned]
    most = max(choose_bucket(config, own, tower.token_buckets).tokens for own in grids)
    sizes = [astuple(bucket_of_tokens(config, own, most)) for own in grids]
    bucket = Bucket(*np.max(sizes, axis=0).tolist())
    weight = tower.patch_embed.proj.weight
    check_memory(config, bucket.tokens, tower.dtype, lambda: free_memory(weight))
    layouts = [plan_layout(config, own, bucket, output) for own in grids]

    patches = np.zeros((devices, bucket.tokens, config.patch_dim), pixel_values.dtype)
    of_image = np.split(pixel_values, np.cumsum(tokens)[:-1])
    for device, images in enumerate(owned):
        if len(images):
            place = patches[device, : tokens[images].sum()]
            np.concatenate([of_image[image] for image in images], out=place)
        else:
            layouts[device] = replace(layouts[device], num_outputs=0)
    order = _output_order(output_rows(config, grid, output), owned, _padded_rows(layouts[0]))
    return Shares(patches, jax.tree.map(lambda *arrays: np.stack(arrays), *layouts), order)


def encode_shares(tower: VisionTower, shares: Shares, mesh: Mesh, axis: str) -> Embeddings:
    """Encode images on the devices that they were divided among: a pure function, as `encode` is.

    Devices work by themselves until all gather the results, of which each keeps a part.

    Args:
        tower: its parameters the same on all devices, as
            `jax.device_put(tower, NamedSharding(mesh, PartitionSpec()))` makes them.
        shares: as `prepare_shares` returns them, their first axis along the mesh's axis.
        mesh: of any kind of axes; along others than `axis` all is the same.
        axis: the mesh's axis that images are divided along.

    Returns:
        What a call of the tower does, each array [devices x rows, channels] with its rows split
        along the axis. The first `shares.num_outputs` are the images', in their order, the others
        mean nothing. They are bit for bit what `encode` makes of a device's images in this bucket.

    Raises:
        ValueError: no such axis of the mesh, shares for another number of devices, or a tower with
            `frame_attention="cudnn"` or a split one.
    """
    _check_tower(tower)
    if len(shares.order) != _devices(mesh, axis):
        raise ValueError(
            f"shares are for {len(shares.order)} devices, but the mesh's axis {axis!r} has "
            f"{mesh.shape[axis]}"
        )

    def encode_own(tower: VisionTower, shares: Shares) -> Embeddings:
        own = jax.tree.map(lambda x: x[0], shares)
        results = encode(tower, own.patches, own.layout)
        return jax.tree.map(lambda x: jax.lax.all_gather(x, axis, tiled=True)[own.order], results)

    divided = PartitionSpec(axis)
    run = jax.shard_map(
        encode_own,
        mesh=mesh,
        in_specs=(PartitionSpec(), divided),
        out_specs=divided,
        check_vma=False,  # of Pallas' kernels JAX knows no types that vary by device
    )
    return run(tower, shares)


class ImagesOverMesh(nnx.Module):
    """A tower whose calls divide their images among the devices of a mesh.

    Attributes:
        tower: the tower, its parameters the same on all devices.
        mesh, axis: what images are divided along.
    """

    def __init__(self, tower: VisionTower, mesh: Mesh, axis: str) -> None:
        """Bring a tower's parameters to all devices of a mesh; the tower itself stays as it is.

        Raises:
            ValueError: no such axis of the mesh, or a tower with `frame_attention="cudnn"` or a
                split one.
        """
        _check_tower(tower)
        _devices(mesh, axis)
        self.tower = upload(tower, NamedSharding(mesh, PartitionSpec()))
        self.mesh = mesh
        self.axis = axis

    def __call__(
        self, pixel_values: ArrayLike, grid_thw: ArrayLike, *, output: str = "embeddings"
    ) -> Embeddings:
        """Encode images and clips as a call of the tower does.

        Args and errors are those of such a call.

        Returns:
            The same, on every device of the mesh.
        """
        devices = self.mesh.shape[self.axis]
        shares = prepare_shares(self.tower, pixel_values, grid_thw, devices, output=output)
        own = NamedSharding(self.mesh, PartitionSpec(self.axis))
        results = compiled(_encode_shares, self)(upload(shares, own))
        results = jax.device_put(results, NamedSharding(self.mesh, PartitionSpec()))
        return jax.tree.map(lambda rows: first_rows(rows, shares.num_outputs), results)


def _encode_shares(spread: ImagesOverMesh, shares: Shares) -> Embeddings:
    return encode_shares(spread.tower, shares, spread.mesh, spread.axis)


def split_tower(tower: VisionTower, mesh: Mesh, axis: str) -> VisionTower:
    """Divide a tower's blocks among the devices of a mesh, for calls of one huge image.

    Each device has whole heads and whole channels of each MLP. Twice a block the devices sum what
    they have, in fp32. So results differ from one device's by the order of sums, and on a GPU by a
    rounding before the residual sum, which one device's product does without. The rest of the
    tower, and the tokens between products, are the same on all devices.

    Args:
        tower: as loaded; stays as it is.
        mesh: along other axes than `axis` all is the same. The tower takes its axes for automatic
            ones, of whatever kind they are, so that no array's type names them; a mesh that is set
            (`jax.set_mesh`) around its calls has to have such axes.
        axis: the mesh's axis that blocks are divided along.

    Returns:
        A tower to call and to differentiate like any other, or to `encode` by, with results on
        every device. `save_vision_tower` refuses it: its parameters lie in another order.

    Raises:
        ValueError: no such axis of the mesh, heads or MLPs that its devices cannot share evenly, a
            tower with `frame_attention="cudnn"`, or one with other blocks than it was made with,
            such as an adapter's.
    """
    _check_tower(tower)
    devices, config = _devices(mesh, axis), tower.config
    for name in ("num_heads", "aligned_intermediate_size"):
        if getattr(config, name) % devices:
            raise ValueError(
                f"{name} {getattr(config, name)} is not divisible by the {devices} devices of the "
                f"mesh's axis {axis!r}"
            )
    _check_blocks(tower)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    split = nnx.clone(tower)
    blocks, split.blocks = split.blocks, nnx.List([])
    split = upload(split, NamedSharding(mesh, PartitionSpec()))
    split.blocks = nnx.List([SplitBlock(block, mesh, axis) for block in blocks])
    return split


class SplitBlock(nnx.Module):
    """A block of `split_tower`.

    Attributes:
        block: what each device runs, on its part of the parameters.
        mesh, axis: what they are divided along.
    """

    def __init__(self, block: Block | LateNormBlock, mesh: Mesh, axis: str) -> None:
        """Take over a block, and bring each device its part."""
        devices = mesh.shape[axis]
        block.attn.num_heads //= devices
        block.attn.proj = _SummedOverDevices(block.attn.proj, axis)
        block.mlp.down = _SummedOverDevices(block.mlp.down, axis)
        grouped = jax.tree.map_with_path(
            lambda path, value: _by_devices(path, np.asarray(value), devices), block
        )
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), _specs(block, axis))
        self.block = upload(grouped, shardings)
        self.mesh = mesh
        self.axis = axis

    def __call__(self, x: jax.Array, segments: Segments) -> jax.Array:
        same = PartitionSpec()
        run = jax.shard_map(
            lambda block, x, segments: block(x, segments),
            mesh=self.mesh,
            in_specs=(_specs(self.block, self.axis), same, same),
            out_specs=same,
            check_vma=False,  # of Pallas' kernels JAX knows no types that vary by device
        )
        return run(self.block, x, segments)


class _SummedOverDevices(nnx.Module):
    """A product over channels that are divided: the sum of all devices' products, rounded once."""

    def __init__(self, whole: Linear | SummedProduct, axis: str) -> None:
        self.weight = whole.weight
        self.bias = getattr(whole, "bias", None)
        self.axis = axis

    def __call__(self, *residual_and_x: jax.Array) -> jax.Array:
        """As the product that it stands for: x weight^T, with a bias, or added to a residual."""
        *residual, x = residual_and_x
        y = jax.lax.psum(product(x, self.weight[...], jnp.float32), self.axis)
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32)[None]
        return sum((stream.astype(jnp.float32) for stream in residual), y).astype(x.dtype)


def _by_devices(path: Sequence[Any], value: np.ndarray, devices: int) -> np.ndarray:
    """A parameter of a block such that each device's part of every part lies together."""
    _, parts = _DIVIDED.get(_name(path), (0, 1))
    if parts == 1:
        return value
    grouped = value.reshape(parts, devices, -1, *value.shape[1:])
    return grouped.swapaxes(0, 1).reshape(value.shape)


def _specs(block: Block | LateNormBlock, axis: str) -> Any:
    """How each parameter of a block is divided, as a pytree like the block."""

    def spec(path: Sequence[Any], _: jax.Array) -> PartitionSpec:
        divided = _DIVIDED.get(_name(path))
        return PartitionSpec() if divided is None else PartitionSpec(*[None] * divided[0], axis)

    return jax.tree.map_with_path(spec, block)


def _name(path: Sequence[Any]) -> str:
    """A parameter by its path in a pytree, as `tower_weights` names it."""
    return jax.tree_util.keystr(path[:-1], simple=True, separator=".")  # less that of its value


def _check_blocks(tower: VisionTower) -> None:
    """Refuse what has been put into a block, such as an adapter, whose sums would be wrong."""
    for index, block in enumerate(tower.blocks):
        made = type(block) in (Block, LateNormBlock) and nnx.eval_shape(
            lambda block=block: type(block)(tower.config, tower.dtype)
        )
        if jax.tree.structure(made) != jax.tree.structure(block):
            raise ValueError(f"block {index} is not as it was made: split a tower as it is loaded")


def _check_tower(tower: VisionTower) -> None:
    """Refuse a tower that several devices cannot run, or already do."""
    if tower.frame_attention != "fused":
        raise ValueError(
            f"several devices need frame_attention='fused', got {tower.frame_attention!r}"
        )
    if any(isinstance(block, SplitBlock) for block in tower.blocks):
        raise ValueError("the tower is split over devices already")


def _devices(mesh: Mesh, axis: str) -> int:
    """How many devices there are along an axis of a mesh."""
    if axis not in mesh.axis_names:
        raise ValueError(f"the mesh has no axis {axis!r}, only {', '.join(mesh.axis_names)}")
    return mesh.shape[axis]


def _divide(tokens: np.ndarray, devices: int) -> list[np.ndarray]:
    """Each device's images by their numbers, in order."""
    owner = np.empty(len(tokens), np.int64)
    load = np.zeros(devices, np.int64)
    for image in np.argsort(-tokens, kind="stable"):
        owner[image] = load.argmin()
        load[owner[image]] += tokens[image]
    return [np.flatnonzero(owner == device) for device in range(devices)]


def _padded_rows(layout: Layout) -> int:
    """Rows of what `encode` returns for a layout."""
    pooled = layout.output == "pooled"
    return len(layout.cu_image_seqlens) - 1 if pooled else len(layout.output_order)


def _output_order(counts: np.ndarray, owned: list[np.ndarray], rows: int) -> np.ndarray:
    """Where the images' rows lie among all devices': [devices, rows], see `Shares`.

    Args:
        counts: [images] rows of each image.
        owned: each device's images.
        rows: of each device, padding included.
    """
    first = np.empty_like(counts)
    for device, images in enumerate(owned):
        first[images] = device * rows + np.cumsum(counts[images]) - counts[images]
    order = np.zeros(len(owned) * rows, np.int32)
    shift = first - (np.cumsum(counts) - counts)
    order[: counts.sum()] = np.arange(counts.sum()) + np.repeat(shift, counts)
    return order.reshape(len(owned), rows)
