"""The small ones among a program's parameters, handed to it as one array.

To take in an array costs the host the same whatever its size, and more than half of a tower's are
norms' weights and biases. Weights of products stay apart: packed, they would be in memory twice,
and XLA copies them in front of a product with a bias (compare/results/notes/host.md).
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from flax_models.device import upload


class Place(NamedTuple):
    """Of a packed value: its index among all, its length and dtype."""

    index: int
    length: int
    dtype: np.dtype


@dataclass(frozen=True)
class Packed:
    """Some values in one fp32 array, which holds 16-bit ones exactly; in None if there are none."""

    places: tuple[Place, ...]
    values: tuple[jax.Array, ...]
    array: jax.Array | None
    left: tuple[int, ...]  # indexes of the values that are not packed

    def holds(self, values: Sequence[Any]) -> bool:
        """Whether the values in its places are the very ones that were packed."""
        current = (values[place.index] for place in self.places)
        return all(map(operator.is_, current, self.values))

    def others(self, values: Sequence[Any]) -> Sequence[Any]:
        """All that is not packed, in its order."""
        return [values[index] for index in self.left]


def pack(values: Sequence[Any]) -> Packed:
    """Pack the small ones, through the host; none where not all are on one device."""
    places = small_places(values) if _are_on_one_device(values) else ()
    small = tuple(values[place.index] for place in places)
    left = tuple(sorted(set(range(len(values))) - {place.index for place in places}))
    if not small:
        return Packed((), (), None, left)
    array = np.concatenate([np.asarray(value).astype(np.float32) for value in small])
    array = upload(array, small[0].device if small[0].committed else None)
    return Packed(places, small, array, left)


def small_places(values: Sequence[Any]) -> tuple[Place, ...]:
    """Of those of one axis and 16 bits; XLA cuts fp32 ones by a kernel each.

    Args:
        values: of a shape and a dtype.
    """
    return tuple(
        Place(index, value.shape[0], value.dtype)
        for index, value in enumerate(values)
        if len(value.shape) == 1 and value.dtype.itemsize == 2
    )


def _are_on_one_device(values: Sequence[Any]) -> bool:
    if not all(map(_is_on_one_device, values)):
        return False
    return len({(value.device, value.committed) for value in values}) == 1


def _is_on_one_device(value: Any) -> bool:
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array):
        return False
    return isinstance(value.sharding, SingleDeviceSharding)


def unpack(places: tuple[Place, ...], array: jax.Array, others: Sequence[Any]) -> list[Any]:
    """All values in their order, within the program."""
    ends = np.cumsum([place.length for place in places]).tolist()
    parts = [
        array[end - place.length : end].astype(place.dtype)
        for place, end in zip(places, ends, strict=True)
    ]
    # Behind a barrier XLA cuts all parts of a length in one kernel, without it each in its own.
    parts = jax.lax.optimization_barrier(parts)
    values = list(others)
    for place, part in zip(places, parts, strict=True):
        values.insert(place.index, part)
    return values
