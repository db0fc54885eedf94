"""The operation on JAX's second GPU, and over two at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pallas_kernels
from tests.kernel_cases import assert_same_bits, make_case
from tests.kernel_contract import LENGTHS, STREAM, WINDOW

pytestmark = pytest.mark.gpu(2)

every_kernel = pytest.mark.parametrize(
    "options",
    [
        {"max_seqlen": WINDOW},
        {"max_seqlen": STREAM, "fuse": "qk"},
        {"max_seqlen": STREAM, "fuse": "none"},
    ],
    ids=["window", "rotating stream", "stream"],
)
HEADS = PartitionSpec(None, None, "heads")  # of qkv
HEADS_OUT = PartitionSpec(None, "heads")
SAME = PartitionSpec()


def attention(options):
    return functools.partial(pallas_kernels.fused_rope_attention_qkvpacked, **options)


@every_kernel
def test_a_call_runs_where_its_arrays_are(options):
    case = make_case(LENGTHS, trailing=3)
    results = []
    for device in jax.devices()[:2]:
        arguments = jax.device_put(case.packed, device)
        for function in (attention(options), jax.jit(attention(options))):
            result = function(*arguments)
            assert result.devices() == {device}
            results.append(np.array(result))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@every_kernel
@pytest.mark.parametrize("by", ["shard_map", "explicit axes", "jit"])
def test_heads_spread_over_two_gpus(options, by):
    case = make_case(LENGTHS, heads=4, trailing=3)
    attend = attention(options)
    expected = np.array(jax.jit(attend)(*map(jnp.asarray, case.packed)))
    kinds = jax.sharding.AxisType
    kind = kinds.Explicit if by == "explicit axes" else kinds.Auto
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(kind,))
    specs = HEADS, SAME, SAME, SAME
    arguments = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(case.packed, specs, strict=True)
    ]
    if by == "shard_map":
        attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=HEADS_OUT)
    result = jax.jit(attend)(*arguments)  # jit alone gathers the heads: a kernel is one program
    assert_same_bits(np.array(result), expected)
    if by != "jit":
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, HEADS_OUT), result.ndim)
