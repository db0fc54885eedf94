"""An array's first rows, without a compilation for each number of rows.

XLA's shapes are static: `array[:rows]` is a separate program for each `rows`, and images of any
size make any number. DLPack lets the same memory pass for an array of fewer rows.
"""

import ctypes
from typing import Any

import jax


def first_rows(array: jax.Array, rows: int) -> jax.Array:
    """Take the first rows of an array.

    Args:
        array: any shape of at least one axis; may be traced.
        rows: from 1 to the array's own.

    Returns:
        `array[:rows]`. Of an array that CPUs or GPUs hold whole it shares the memory, all of which
        lives as long as the result does. That of an array on one device is committed to it, as what
        comes through DLPack is, so that no number of rows behaves unlike another.
    """
    whole = rows == array.shape[0]
    if isinstance(array, jax.core.Tracer) or not array.is_fully_replicated:
        return array if whole else array[:rows]
    if len(array.devices()) > 1:
        shape, copies = (rows, *array.shape[1:]), (x.data for x in array.addressable_shards)
        taken = [first_rows(copy, rows) for copy in copies]
        return jax.make_array_from_single_device_arrays(shape, array.sharding, taken)
    taken = array if whole else _through_dlpack(array, rows)
    return taken if taken.committed else jax.device_put(taken, array.device)


def _through_dlpack(array: jax.Array, rows: int) -> jax.Array:
    if array.device.platform not in ("cpu", "gpu"):
        return array[:rows]
    try:
        taken = jax.dlpack.from_dlpack(_FirstRows(array, rows))
    except BufferError:
        return array[:rows]
    # DLPack knows a single CPU, of which JAX can make several devices.
    return taken if taken.device == array.device else jax.device_put(taken, array.device)


class _FirstRows:
    """Exports an array through the DLPack protocol, with fewer rows than it has."""

    def __init__(self, array: jax.Array, rows: int) -> None:
        self._array = array
        self._rows = rows

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        # Asked for no version, JAX returns a capsule of DLPack's original, unversioned form.
        capsule = self._array.__dlpack__(stream=stream)
        if not _is_valid(capsule, b"dltensor"):
            raise BufferError("JAX gave a capsule other than DLPack's 'dltensor'")
        _DLTensor.from_address(_pointer(capsule, b"dltensor")).shape[0] = self._rows
        return capsule


class _DLTensor(ctypes.Structure):
    """DLPack's stable C structure, at the start of what a capsule holds."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
