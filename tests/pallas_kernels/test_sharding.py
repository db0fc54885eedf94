"""Heads that are split over devices along explicit axes of a mesh."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pallas_kernels
from tests.kernel_cases import make_case

# Four devices have to be asked for before JAX starts.
_PROGRAM = """\
import functools

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pallas_kernels
from tests.kernel_cases import make_case


def case_of(heads, **further):
    shape = {"heads": heads, "head_dim": 16, "dtype": "float32", "trailing": 3}
    return make_case((5, 0, 9), **shape, **further)


mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)


def results(arguments, norms, packed, implementation, max_seqlen):
    name = "fused_rope_attention" + "_qkvpacked" * packed
    attend = functools.partial(
        getattr(pallas_kernels, name), max_seqlen=max_seqlen, implementation=implementation
    )

    def loss(cu_seqlens, norms, *arguments):
        out = attend(*arguments, cu_seqlens, **norms)
        return (out**2).sum(), out

    *differentiable, cu_seqlens = arguments
    gradients = jax.jit(jax.grad(loss, tuple(range(1, len(arguments) + 1)), True))
    return jax.tree.leaves(gradients(cu_seqlens, norms, *differentiable))


for packed, heads, case, *options in (
    (True, ("a", "b"), case_of(4), "kernel", 16),
    (True, ("a", "b"), case_of(4), "kernel", 40),  # which no tile holds
    (False, "b", case_of(4), "auto", 16),
    (False, ("a", "b"), case_of(8, group=2, norms="qk"), "kernel", 16),
):
    arguments = case.packed if packed else case.separate
    expected = results(arguments, case.norms, packed, *options)
    by_heads = PartitionSpec(None, *[None] * packed, heads)
    specs = [by_heads if x.ndim > 2 else PartitionSpec() for x in arguments]
    split = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    ]
    same = NamedSharding(mesh, PartitionSpec())
    norms = {name: jax.device_put(x, same) for name, x in case.norms.items()}
    for ours, whole in zip(results(split, norms, packed, *options), expected, strict=True):
        if whole.ndim > 2:
            assert heads in jax.typeof(ours).sharding.spec, (packed, *options)
        np.testing.assert_allclose(ours, whole, rtol=0, atol=1e-5 * np.abs(whole).max())
"""


@pytest.mark.long
def test_each_device_attends_with_its_own_heads():
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    command = [sys.executable, "-c", _PROGRAM]
    result = subprocess.run(
        command, env=os.environ | devices, check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "axis", "message"),
    [
        ("q", 0, r"q must be split over devices by heads alone, as in .*, got .*\('x', None, None"),
        ("k", 1, r"k must be split .*, as in .*\(None, None, None\), got .*\(None, 'x', None"),
        ("cos", 0, r"cos must be the same on all devices, got .*\('x', None"),
        ("sin", 1, r"sin must be the same on all devices, got .*\(None, 'x'"),
        ("cu_seqlens", 0, r"cu_seqlens must be the same on all devices, got .*\('x',"),
    ],
)
def test_other_ways_to_split_are_refused(name, axis, message):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    names = ("q", "k", "v", "cos", "sin", "cu_seqlens")
    arguments = dict(zip(names, map(jnp.asarray, make_case((5,)).separate), strict=True))
    split = NamedSharding(mesh, PartitionSpec(*[None] * axis, "x"))
    arguments[name] = jax.device_put(arguments[name], split)
    attend = functools.partial(pallas_kernels.fused_rope_attention, max_seqlen=8)
    with pytest.raises(ValueError, match=message):
        attend(**arguments)
