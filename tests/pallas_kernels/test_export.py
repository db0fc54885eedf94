"""Calls as `jax.export` writes them, for machines that serve."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import pallas_kernels
from tests.kernel_cases import make_case
from tests.pallas_kernels.no_gpu import cuda_device, hide_gpus, kernels_in


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The same is exported on every machine."""
    hide_gpus(monkeypatch)
    yield
    jax.clear_caches()


def exported(lengths, platforms, implementation="auto", max_seqlen=64):
    attend = functools.partial(
        pallas_kernels.fused_rope_attention_qkvpacked,
        max_seqlen=max_seqlen,
        implementation=implementation,
    )
    arrays = [jnp.asarray(x) for x in make_case(lengths, head_dim=16, dtype="bfloat16").packed]
    with cuda_device():
        made = export.export(
            jax.jit(attend), platforms=platforms, disabled_checks=pallas_kernels.export_checks()
        )(*arrays)
    return made, attend, arrays


@pytest.mark.parametrize("implementation", ["auto", "kernel"])
@pytest.mark.parametrize(
    ("lengths", "kernels"),
    [((64, 30), ["window_kernel"]), ((200, 300), ["rotate_kernel", "stream_kernel"])],
    ids=["window", "stream"],
)
def test_one_program_serves_cpu_and_cuda(lengths, kernels, implementation):
    pytest.importorskip("flatbuffers")
    both, attend, arrays = exported(lengths, ("cpu", "cuda"), implementation, max(lengths))
    served = export.deserialize(both.serialize())
    assert kernels_in(served) == [("triton", name) for name in kernels]
    cpu = jax.local_devices(backend="cpu")[0]
    arrays = jax.device_put(arrays, cpu)
    np.testing.assert_array_equal(np.asarray(served.call(*arrays)), np.asarray(attend(*arrays)))


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids=["cuda", "both"])
def test_what_the_triton_package_compiled_is_in_the_program(request, platforms):
    """As on a machine with a GPU: what serves it need not have that package."""
    for module in ("flatbuffers", "triton", "torch"):
        pytest.importorskip(module)
    found = request.getfixturevalue("found")
    made, *_ = exported((64, 30), platforms)
    served = export.deserialize(made.serialize())
    assert kernels_in(served) == [("ptx", "window_kernel")]
    [kernel] = found.kernels
    assert str(served.mlir_module()).count(".visible .entry window_kernel(") == 1
    assert ".visible .entry window_kernel(" in kernel.ptx


def test_groups_and_norms_on_both():
    pytest.importorskip("flatbuffers")
    case = make_case((64, 30), head_dim=16, heads=4, group=2, norms="qk")
    attend = jax.jit(functools.partial(pallas_kernels.fused_rope_attention, max_seqlen=64))
    cpu = jax.local_devices(backend="cpu")[0]
    arguments = jax.device_put(tuple(map(jnp.asarray, case.separate)), cpu)
    norms = jax.device_put(jax.tree.map(jnp.asarray, case.norms), cpu)
    with cuda_device():
        checks = {"disabled_checks": pallas_kernels.export_checks()}
        made = export.export(attend, platforms=("cpu", "cuda"), **checks)(*arguments, **norms)
    served = export.deserialize(made.serialize()).call(*arguments, **norms)
    np.testing.assert_array_equal(np.asarray(served), np.asarray(attend(*arguments, **norms)))


def test_each_platform_alone():
    pytest.importorskip("flatbuffers")
    for platform, kernels in (("cpu", []), ("cuda", [("triton", "window_kernel")])):
        alone, *_ = exported((64, 30), (platform,))
        served = export.deserialize(alone.serialize())
        assert kernels_in(served) == kernels
        assert served.platforms == (platform,)


@pytest.mark.parametrize("lengths", [(64, 30), (150,)])
def test_gradients_are_exported_too(lengths):
    both, attend, arrays = exported(lengths, ("cpu", "cuda"), max_seqlen=max(lengths))
    assert both.has_vjp()
    cpu = jax.local_devices(backend="cpu")[0]
    qkv, *rest = jax.device_put(arrays, cpu)

    def loss(attend, qkv):
        return jnp.square(attend(qkv, *rest).astype(jnp.float32)).sum()

    ours, theirs = (jax.grad(functools.partial(loss, f))(qkv) for f in (both.call, attend))
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_sizes_that_are_not_known_are_refused():
    [tokens] = export.symbolic_shape("tokens")
    qkv = jax.ShapeDtypeStruct((tokens, 3, 2, 16), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((tokens, 8), jnp.float32)
    cu_seqlens = jax.ShapeDtypeStruct((3,), jnp.int32)
    attend = jax.jit(
        functools.partial(pallas_kernels.fused_rope_attention_qkvpacked, max_seqlen=64)
    )
    with pytest.raises(ValueError, match="qkv must have sizes that are known"):
        export.export(attend)(qkv, angles, angles, cu_seqlens)
