"""Heads that are split over devices along explicit axes of a mesh, the default kind.

An array's type names the explicit axes that it is split along, and a kernel, written for the arrays
of one device, cannot be traced with such types. Axes of other kinds are in no type. Under shard_map
a type says over which axes an array varies from device to device.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from pallas_kernels.checks import NAMES, Norms


def check_shardings(*arrays: jax.Array, norms: Norms) -> None:
    """Raise ValueError for the first argument that is split otherwise than by heads.

    arrays are (q, k, v, cos, sin, cu_seqlens), or (qkv, cos, ...).
    """
    *before, heads, _ = _spec(arrays[0])
    by_heads = PartitionSpec(*(None for _ in before), heads, None)
    names = *NAMES[len(arrays)], "q_norm", "k_norm"
    for name, x in zip(names, (*arrays, *norms), strict=True):
        if x is None:
            continue
        spec = _spec(x)
        if name in ("q", "k", "v", "qkv"):
            if spec != by_heads:
                raise ValueError(
                    f"{name} must be split over devices by heads alone, as in {by_heads}, "
                    f"got {spec}"
                )
        elif any(spec):
            raise ValueError(f"{name} must be the same on all devices, got {spec}")


def on_own_heads(
    attention: Callable[..., jax.Array],
    qkv: tuple[jax.Array, ...],
    norms: Norms,
    *rest: jax.Array,
) -> jax.Array:
    """attention(qkv, norms, cos, sin, cu_seqlens), by each device on its own heads if they are
    split.

    Each of qkv is [tokens, parts, heads, head_dim], the result [tokens, heads, head_dim].
    """
    heads = _spec(qkv[0])[2]
    if heads is None:
        return attention(qkv, norms, *rest)
    split, same = PartitionSpec(None, None, heads), PartitionSpec()
    split_attention = jax.shard_map(
        attention,
        mesh=jax.typeof(qkv[0]).sharding.mesh,
        axis_names={heads} if isinstance(heads, str) else set(heads),
        in_specs=((split,) * len(qkv), same, same, same, same),
        out_specs=PartitionSpec(None, heads),
        check_vma=False,  # Pallas' interpreter mixes what varies by device with what does not
    )
    return split_attention(qkv, norms, *rest)


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """The mesh axes that any of the arrays varies over, under shard_map."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary_as(*arrays: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """What makes an array vary over all mesh axes that any of these varies over."""
    axes = varying_axes(*arrays)

    def vary(x: jax.Array) -> jax.Array:
        missing = axes - varying_axes(x)
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return vary


def _spec(x: jax.Array) -> PartitionSpec:
    """For each axis of an array the explicit axes of a mesh that split it; None where none do."""
    return jax.typeof(x).sharding.spec
