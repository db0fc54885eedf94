"""The Pallas kernels touch nothing outside their arrays, whatever cu_seqlens holds.

XLA places the arrays, so no guards can stand around them. Instead every tile that a kernel loads or
stores in the interpreter is watched: elements that its mask lets through must lie in the array. (On
a GPU `make sanitize` shows the same of the compiled kernels.)
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.kernels import tiles
from tests.hostile import TOKENS, hostile_cu_seqlens, refusable
from tests.kernel_cases import make_case
from tests.kernel_contract import STREAM, WINDOW, cut
from tests.pallas_kernels.adapter import public_function

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="only the interpreter's kernels can be watched"
)


def inside(window):
    """Mask of the elements of a ref's window that lie in the ref, broadcastable to the window."""
    indices = window.transforms[-1].indices
    slices = [hasattr(index, "size") and hasattr(index, "start") for index in indices]
    ok, dimension = True, 0
    for index, is_slice, limit in zip(indices, slices, window.ref.shape, strict=True):
        if is_slice:
            behind = (1,) * (sum(slices) - dimension - 1)
            index = (index.start + jnp.arange(index.size)).reshape(-1, *behind)
            dimension += 1
        ok = ok & (index >= 0) & (index < limit)
    return ok


@pytest.fixture
def outside(monkeypatch):
    """Counts of elements that tiles loaded and stored outside their arrays."""
    counts = []

    def watch(window, mask):
        touched = ~inside(window) if mask is None else ~inside(window) & mask
        jax.debug.callback(lambda n: counts.append(int(n)), touched.sum())

    def load(window, *, mask=None, **options):
        watch(window, mask)
        return plgpu.load(window, mask=mask, **options)

    def store(window, tile, *, mask=None, **options):
        watch(window, mask)
        plgpu.store(window, tile, mask=mask, **options)

    watched = SimpleNamespace(**vars(plgpu) | {"load": load, "store": store})
    monkeypatch.setattr(tiles, "plgpu", watched)
    jax.clear_caches()  # of calls that nobody watched
    return counts


def attention(fuse, max_seqlen):
    options = {"fuse": fuse, "max_seqlen": max_seqlen, "implementation": "kernel"}
    return jax.jit(public_function(False, options))


@pytest.mark.parametrize(
    ("fuse", "max_seqlen", "dtype"),
    [
        ("qk", 16, "float32"),
        ("none", WINDOW, "float32"),
        ("qk", STREAM, "float32"),
        ("none", STREAM, "float32"),
        ("q", STREAM, "bfloat16"),  # tiles of 64 rows, in which Q goes by way of the result
    ],
)
def test_nothing_outside_the_arrays_is_read_or_written(fuse, max_seqlen, dtype, outside):
    attend = attention(fuse, max_seqlen)
    tolerance = {"float32": 1e-5, "bfloat16": 2**-8}[dtype]

    @hostile_cu_seqlens(usual=10)
    def check(cu_seqlens):
        # In bf16 the second head's rows begin within a sector.
        case = cut(cu_seqlens, tokens=TOKENS, head_dim=72, heads=2, dtype=dtype)
        outside.clear()
        result = np.array(attend(*map(jnp.asarray, case.separate)), np.float32)
        jax.effects_barrier()
        assert len(outside) > 5
        assert sum(outside) == 0
        largest = np.abs(case.qkv[:, 2].astype(np.float32)).max() * (1 + tolerance)
        may_refuse = refusable(case.cu_seqlens, max_seqlen)[:, None, None]
        assert ((np.abs(result) <= largest) | (np.isnan(result) & may_refuse)).all()

    check()


def test_nor_is_what_lies_behind_the_last_block_of_keys(outside):
    """Whole blocks come before it, of which the next one's tail is loaded ahead."""
    case = make_case([130], head_dim=72, heads=1)
    attention("none", STREAM)(*map(jnp.asarray, case.separate)).block_until_ready()
    jax.effects_barrier()
    assert len(outside) > 5
    assert sum(outside) == 0


@pytest.mark.parametrize("max_seqlen", [16, STREAM])
@pytest.mark.parametrize("length", [17, 40])
def test_every_element_is_written_once(max_seqlen, length, monkeypatch):
    """Also those of a segment that is longer than promised: the interpreter's memory is NaN before,
    as what is to be written there."""
    written = []

    def store(window, tile, *, mask=None, **options):
        elements = jnp.broadcast_to(inside(window) if mask is None else mask, tile.shape)
        jax.debug.callback(lambda n: written.append(int(n)), elements.sum())
        plgpu.store(window, tile, mask=mask, **options)

    monkeypatch.setattr(tiles, "plgpu", SimpleNamespace(**vars(plgpu) | {"store": store}))
    jax.clear_caches()  # of calls that nobody watched
    case = make_case((9, length, 0, 16), head_dim=72, trailing=3, dtype="float32")
    out = attention("qk", max_seqlen)(*map(jnp.asarray, case.separate))
    jax.effects_barrier()
    assert sum(written) == out.size


def test_a_kernel_that_trusts_cu_seqlens_is_found(monkeypatch, outside):
    bounds = functools.partial(lambda ref, segment, tokens: (ref[segment], ref[segment + 1]))
    monkeypatch.setattr("pallas_kernels.kernels.window.segment_bounds", bounds)
    case = cut((-1, 9, 33), tokens=TOKENS, head_dim=72, heads=1, dtype="float32")
    attention("qk", WINDOW)(*map(jnp.asarray, case.separate)).block_until_ready()
    jax.effects_barrier()
    assert sum(outside) > 0
