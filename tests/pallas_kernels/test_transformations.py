"""pallas_kernels under JAX's transformations."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import pallas_kernels
from pallas_kernels.launching import devices
from tests.kernel_cases import assert_accurate, assert_same_bits, make_case
from tests.kernel_contract import STREAM, WINDOW, cut

implementations = pytest.mark.parametrize("implementation", ["kernel", "reference"])


def attention(implementation, max_seqlen):
    return functools.partial(
        pallas_kernels.fused_rope_attention_qkvpacked,
        max_seqlen=max_seqlen,
        implementation=implementation,
    )


def use_the_interpreter():
    """From its first use on, JAX's interpreter is among what programs are told apart by."""
    jax.jit(attention("kernel", WINDOW))(*map(jnp.asarray, make_case((5,)).packed))


@implementations
def test_one_compilation_serves_every_cut_into_segments(implementation, compilations):
    use_the_interpreter()
    attend, programs = jax.jit(attention(implementation, WINDOW)), []
    for cu_seqlens in ((0, 16, 32, 32), (3, 3, 30, 40), (0, 0, 0, 0)):
        case = cut(cu_seqlens, tokens=40, head_dim=16)
        result = np.array(attend(*map(jnp.asarray, case.packed)))
        programs.append(compilations.copy())
        if not case.padding.all():
            assert_accurate(result, case)
    assert programs[0] == programs[-1]


@implementations
def test_calls_outside_of_jit_compile_once(implementation, compilations):
    use_the_interpreter()
    attend = attention(implementation, 16)
    arguments = [jnp.asarray(x) for x in make_case((5, 11), head_dim=24).packed]
    first = attend(*arguments)
    compilations.clear()
    assert_same_bits(np.array(attend(*arguments)), np.array(first))
    assert not compilations


def test_triton_is_another_word_for_the_kernel(compilations):
    arguments = [jnp.asarray(x) for x in make_case((5, 11), head_dim=24).packed]
    kernel = attention("kernel", 16)(*arguments)
    compilations.clear()
    assert_same_bits(np.array(attention("triton", 16)(*arguments)), np.array(kernel))
    assert not compilations


def test_lengths_that_are_read_are_compiled_for_by_powers_of_two(compilations):
    attend = attention("reference", None)
    *arrays, _ = map(jnp.asarray, make_case((20, 20), head_dim=16, dtype="float32").packed)
    expected = attention("reference", 40)(*arrays, np.array([0, 25, 40], np.int32))
    attend(*arrays, np.array([0, 20, 40], np.int32))
    compilations.clear()
    out = attend(*arrays, np.array([0, 25, 40], np.int32))
    assert not compilations
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)


def test_auto_is_a_kernel_where_there_is_a_gpu_and_else_the_reference():
    case = make_case((5, 9), head_dim=16)
    expected = "kernel" if jax.default_backend() == "gpu" else "reference"
    results = [
        np.array(jax.jit(attention(implementation, 16))(*map(jnp.asarray, case.packed)))
        for implementation in ("auto", expected)
    ]
    assert_same_bits(*results)


def test_another_vendors_gpu_is_left_to_the_reference(monkeypatch):
    """What JAX calls "gpu" may be AMD's, whose capability is no number, or Intel's, without one."""
    local_devices = jax.local_devices

    def beside_an_amd_gpu(*arguments, backend=None, **keywords):
        if backend == "gpu":
            return [types.SimpleNamespace(device_kind="AMD GPU", compute_capability="gfx942")]
        return local_devices(*arguments, backend=backend, **keywords)

    case = make_case((5, 9), head_dim=16)
    expected = np.array(attention("auto", 16)(*map(jnp.asarray, case.packed)))
    jax.clear_caches()
    monkeypatch.setattr(jax, "local_devices", beside_an_amd_gpu)
    monkeypatch.setattr(devices, "local_gpus", devices.local_gpus.__wrapped__)
    assert_same_bits(np.array(attention("auto", 16)(*map(jnp.asarray, case.packed))), expected)


@pytest.mark.parametrize(
    ("implementation", "max_seqlen"),
    [("kernel", WINDOW), ("kernel", STREAM), ("reference", WINDOW)],
)
def test_vmap_is_the_calls_one_after_the_other(implementation, max_seqlen):
    attend = attention(implementation, max_seqlen)
    cases = [
        cut(cu_seqlens, tokens=40, head_dim=16, dtype="float32", seed=seed)
        for seed, cu_seqlens in enumerate([(0, 16, 32, 32), (3, 3, 30, 40)])
    ]
    stacked = [jnp.stack(x) for x in zip(*(case.packed for case in cases), strict=True)]
    for result, case in zip(jax.jit(jax.vmap(attend))(*stacked), cases, strict=True):
        assert_accurate(np.array(result), case)
    # The angles and the segments in common.
    shared = jax.jit(jax.vmap(attend, in_axes=(0, None, None, None)))
    second = dataclasses.replace(cases[0], qkv=cases[1].qkv)
    assert_accurate(np.array(shared(stacked[0], *second.packed[1:])[1]), second)


def test_vmap_of_a_gradient():
    attend = attention("kernel", STREAM)
    case = make_case((5, 9), head_dim=16, dtype="float32")
    qkv, *rest = map(jnp.asarray, case.packed)
    gradient = jax.grad(lambda qkv: (attend(qkv, *rest) ** 2).sum())
    batch = jnp.stack([qkv, 2 * qkv])
    together = jax.jit(jax.vmap(gradient))(batch)
    alone = np.stack([jax.jit(gradient)(qkv) for qkv in batch])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5 * np.abs(alone).max())


def test_inside_a_scan_and_under_remat():
    case = make_case((5, 9), head_dim=16, dtype="float32")
    qkv, *rest = map(jnp.asarray, case.packed)
    attend = attention("kernel", WINDOW)

    @jax.checkpoint
    def layer(qkv, _):
        return qkv.at[:, 2].set(attend(qkv, *rest)), None

    def loss(qkv):
        return jax.lax.scan(layer, qkv, length=3)[0].sum()

    by_hand = qkv
    for _ in range(3):
        by_hand = layer(by_hand, None)[0]
    np.testing.assert_allclose(jax.jit(loss)(qkv), by_hand.sum(), rtol=1e-4)
    assert jnp.isfinite(jax.jit(jax.grad(loss))(qkv)).all()


@pytest.mark.parametrize(
    ("lengths", "max_seqlen"), [((5, 9), WINDOW), ((5, 9), STREAM), ((), WINDOW)]
)
def test_inside_shard_map(lengths, max_seqlen):
    """With JAX's check of what varies from device to device; here heads do, angles do not."""
    case = make_case(lengths, heads=2, head_dim=16, dtype="float32", trailing=3)
    *arrays, cu_seqlens = map(jnp.asarray, case.packed)
    attend = functools.partial(attention("auto", max_seqlen), cu_seqlens=cu_seqlens)
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    heads, same = PartitionSpec(None, None, "heads"), PartitionSpec()
    split = jax.shard_map(
        attend, mesh=mesh, in_specs=(heads, same, same), out_specs=PartitionSpec(None, "heads")
    )
    assert_same_bits(*(np.array(jax.jit(f)(*arrays)) for f in (attend, split)))

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: (function(*x) ** 2).sum(), argnums=(0, 1, 2)))(*arrays)

    for ours, expected in zip(gradients(split), gradients(attend), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("varying", [0, 2, 3, 5])
def test_inside_shard_map_where_one_argument_alone_differs_from_device_to_device(varying):
    arguments = list(map(jnp.asarray, make_case((5, 9), head_dim=16, dtype="float32").separate))
    mesh = jax.make_mesh((1,), ("calls",), axis_types=(jax.sharding.AxisType.Auto,))

    attend = functools.partial(
        pallas_kernels.fused_rope_attention, max_seqlen=16, implementation="reference"
    )

    def split(*x):
        def with_one(one):
            return attend(*x[:varying], one, *x[varying + 1 :])

        spec = PartitionSpec("calls")
        return jax.shard_map(with_one, mesh=mesh, in_specs=spec, out_specs=spec)(x[varying])

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: (function(*x) ** 2).sum(), range(5)))(*arguments)

    assert_same_bits(*(np.array(jax.jit(f)(*arguments)) for f in (attend, split)))
    for ours, expected in zip(gradients(split), gradients(attend), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "disable_jit"])
@implementations
def test_debug_nans_tells_a_broken_bound_and_nothing_else(implementation, jitted):
    arguments = [jnp.asarray(x) for x in make_case((6, 40), head_dim=16).packed]

    def loss(longest, qkv):
        return attention(implementation, longest)(qkv, *arguments[1:]).sum()

    calls = loss, jax.grad(loss, argnums=1)
    with jax.disable_jit(not jitted), jax.debug_nans(True):
        for call in calls:
            assert jnp.isfinite(call(40, arguments[0])).all()
        for call in calls:
            with pytest.raises(FloatingPointError):
                call(8, arguments[0])
