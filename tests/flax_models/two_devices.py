"""What two devices compute together is what one does; for a process in which JAX has two.

python -m tests.flax_models.two_devices DIRECTORY
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from flax_models import VisionTower, encode, load_vision_tower, save_vision_tower
from flax_models.mesh import ImagesOverMesh, encode_shares, prepare_shares, split_tower
from tests.tower_checkpoints import SMALL_TOWERS, random_patches, write_checkpoint

# Each kind of block, with and without DeepStack.
CONFIGS = {
    "late_norm": replace(SMALL_TOWERS["head_dim_16"], depth=2, fullatt_block_indexes=(1,)),
    "gelu": replace(SMALL_TOWERS["qwen3_vl"], depth=1, deepstack_visual_indexes=(0,)),
    "quick_gelu": replace(SMALL_TOWERS["qwen2_vl"], depth=1, num_heads=2),
    "gated": replace(SMALL_TOWERS["head_dim_16"], depth=1, fullatt_block_indexes=()),
}
# The largest is neither the first nor the last, and there is a clip.
IMAGES = [(1, 4, 6), (1, 10, 12), (2, 6, 4), (1, 8, 8), (1, 2, 2)]
FP32 = 1e-5  # of the largest value: sums of another order


def make_mesh(kind: AxisType) -> Mesh:
    return jax.make_mesh((2,), ("x",), (kind,), devices=jax.devices()[:2])


def assert_equal(ours: Any, whole: Any, tolerance: float = FP32) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(whole)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(whole), strict=True):
        assert x.shape == y.shape, (x.shape, y.shape)
        x, y = (np.asarray(value, np.float32) for value in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())


def check_calls(tower: VisionTower, mesh: Mesh) -> None:
    """Images divided among devices, and blocks."""
    patches = random_patches(tower.config, IMAGES)
    whole = tower(patches, IMAGES)
    split = split_tower(tower, mesh, "x")
    for spread in (ImagesOverMesh(tower, mesh, "x"), split):
        assert_equal(spread(patches, IMAGES), whole)
        # Nothing goes by way of one device, which a program might not wait for.
        with jax.transfer_guard_device_to_device("disallow"):
            again = jax.tree.leaves(spread(patches, IMAGES))
        assert {x.devices() == set(mesh.devices.flat) for x in again} == {True}
    block = split.blocks[0].block
    for divided, axis in ((block.attn.qkv.weight, 0), (block.mlp.down.weight, 1)):
        shards = divided.get_raw_value().addressable_shards
        assert {x.data.shape[axis] for x in shards} == {divided.shape[axis] // 2}


def check_rounding(fp32: VisionTower, bf16: VisionTower, mesh: Mesh) -> None:
    """On a GPU one device adds the residual stream before it rounds; two do not."""
    patches = random_patches(fp32.config, IMAGES)
    exact = np.asarray(fp32(patches, IMAGES))
    towers = bf16, split_tower(bf16, mesh, "x")
    errors = [np.asarray(tower(patches, IMAGES), np.float32) - exact for tower in towers]
    one, two = map(np.linalg.norm, errors)
    assert two <= 1.25 * one, (two, one)


def check_own_jit(tower: VisionTower, mesh: Mesh) -> None:
    """Fewer images than devices, pooled."""
    patches, grid = random_patches(tower.config, IMAGES[:1]), IMAGES[:1]
    shares = prepare_shares(tower, patches, grid, 2, output="pooled")
    same, divided = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("x",)))
    inputs = jax.device_put(tower, same), jax.device_put(shares, divided)
    ours = jax.jit(encode_shares, static_argnums=(2, 3))(*inputs, mesh, "x")
    assert ours.sharding.spec[0] == "x"
    whole = tower(patches, grid, output="pooled")
    assert_equal(np.asarray(ours)[: shares.num_outputs], whole)


def check_gradients(tower: VisionTower, mesh: Mesh) -> None:
    patches = random_patches(tower.config, IMAGES)
    shares = prepare_shares(tower, patches, IMAGES, 2)
    inputs = tower.prepare(patches, IMAGES)
    rows = inputs[1].num_outputs
    whole = gradient_norms(tower, lambda tower: encode(tower, *inputs)[:rows])
    split = split_tower(tower, mesh, "x")
    for ours in (
        gradient_norms(tower, lambda tower: encode_shares(tower, shares, mesh, "x")[:rows]),
        gradient_norms(split, lambda tower: encode(tower, *inputs)[:rows]),
    ):
        assert ours.keys() == whole.keys()
        for name, norm in whole.items():
            assert abs(ours[name] - norm) <= 1e-4 * norm, (name, ours[name], norm)


def gradient_norms(tower: VisionTower, run: Callable) -> dict[str, jax.Array]:
    """Of each parameter's gradient the root of its square sum, which no order changes."""

    def loss(tower: VisionTower) -> jax.Array:
        rows = run(tower)
        return jnp.sum(rows * jnp.cos(jnp.arange(rows.size, dtype=rows.dtype)).reshape(rows.shape))

    @jax.jit
    def norms(tower: VisionTower) -> dict[str, jax.Array]:
        flat, _ = jax.tree.flatten_with_path(jax.grad(loss)(tower))
        names = (jax.tree_util.keystr(path).replace(".block.", ".") for path, _ in flat)
        return {name: jnp.linalg.norm(x) for name, (_, x) in zip(names, flat, strict=True)}

    return norms(tower)


def check_refusals(tower: VisionTower, mesh: Mesh, directory: Path) -> None:
    config = SMALL_TOWERS["qwen2_vl"]
    one_head = load_vision_tower(write_checkpoint(directory / "one_head", config))
    shares = prepare_shares(tower, random_patches(tower.config, IMAGES), IMAGES, 3)
    split = split_tower(tower, mesh, "x")
    adapted = nnx.clone(tower)
    proj = adapted.blocks[0].attn.proj
    adapted.blocks[0].attn.proj = nnx.LoRA(
        proj.weight.shape[1], 2, proj.weight.shape[0], base_module=proj, rngs=nnx.Rngs(0)
    )
    for message, call, *arguments in (
        ("no axis 'y', only x", ImagesOverMesh, tower, mesh, "y"),
        ("no axis 'y', only x", split_tower, tower, mesh, "y"),
        ("shares are for 3 devices, .* 'x' has 2", encode_shares, tower, shares, mesh, "x"),
        ("num_heads 1 is not divisible by the 2 devices", split_tower, one_head, mesh, "x"),
        ("is split over devices already", split_tower, split, mesh, "x"),
        ("is split over devices already", ImagesOverMesh, split, mesh, "x"),
        ("block 0 is not as it was made", split_tower, adapted, mesh, "x"),
        ("must be those of a trainable tower", save_vision_tower, split, directory / "saved"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*arguments)
    tower.frame_attention = "cudnn"
    for call, *arguments in (
        (ImagesOverMesh, tower, mesh, "x"),
        (prepare_shares, tower, random_patches(tower.config, IMAGES), IMAGES, 2),
        (encode_shares, tower, shares, mesh, "x"),
        (split_tower, tower, mesh, "x"),
    ):
        with pytest.raises(ValueError, match="several devices need frame_attention='fused'"):
            call(*arguments)


def main(directory: Path) -> None:
    def load(name: str, dtype: DTypeLike = jnp.float32) -> VisionTower:
        return load_vision_tower(directory / name, dtype, trainable=name == "gated")

    for name, config in CONFIGS.items():
        write_checkpoint(directory / name, config)
    explicit, auto = map(make_mesh, (AxisType.Explicit, AxisType.Auto))
    check_calls(load("late_norm"), explicit)
    check_calls(load("gelu"), auto)
    check_rounding(load("quick_gelu"), load("quick_gelu", jnp.bfloat16), explicit)
    check_own_jit(load("gated"), auto)
    check_gradients(load("gated"), auto)
    check_refusals(load("gated"), auto, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
