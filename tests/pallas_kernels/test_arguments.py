"""What pallas_kernels refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from tests.kernel_argument_contract import CASE, ArgumentContract
from tests.kernel_cases import make_case
from tests.pallas_kernels.adapter import JaxAdapter


class Arguments(JaxAdapter, ArgumentContract):
    @staticmethod
    def array(x):
        """NumPy's, which is taken too, where JAX would make numbers of 32 bits of it."""
        return x if x.dtype in (np.float64, np.int64) else jnp.asarray(x)


class TestKernel(Arguments):
    implementation = "kernel"


class TestReference(Arguments):
    implementation = "reference"


def test_numpy_arrays_are_taken():
    out = pallas_kernels.fused_rope_attention_qkvpacked(*CASE.packed, max_seqlen=8)
    assert isinstance(out, jax.Array)


@pytest.mark.parametrize("name", ["q", "k", "v", "cos", "sin", "cu_seqlens"])
def test_what_is_no_array_is_refused(name):
    names = ("q", "k", "v", "cos", "sin", "cu_seqlens")
    arguments = dict(zip(names, CASE.separate, strict=True))
    for wrong in (arguments[name].tolist(), None, jax.typeof(jnp.asarray(arguments[name]))):
        message = f"{name} must be a jax.Array, got {type(wrong).__name__}"
        with pytest.raises(TypeError, match=message):
            pallas_kernels.fused_rope_attention(**arguments | {name: wrong}, max_seqlen=7)


def test_cu_seqlens_of_numpy_needs_no_max_seqlen_under_jit():
    *arrays, cu_seqlens = CASE.packed
    attend = functools.partial(pallas_kernels.fused_rope_attention_qkvpacked, cu_seqlens=cu_seqlens)
    np.testing.assert_array_equal(
        jax.jit(attend)(*arrays), jax.jit(functools.partial(attend, max_seqlen=7))(*arrays)
    )


@pytest.mark.parametrize(("name", "value"), [("scale", 0.25), ("max_seqlen", 7)])
def test_what_is_static(name, value):
    attend = functools.partial(pallas_kernels.fused_rope_attention_qkvpacked, *CASE.packed)
    with pytest.raises(ValueError, match=f"{name} must be static, got a traced value"):
        jax.jit(lambda x: attend(**{"max_seqlen": 7, name: x}))(value)


def test_padding_before_the_first_segment_is_no_segment():
    """Taken for one, it would have short segments served by the kernel for long ones."""
    case = make_case([5, 7], head_dim=16, leading=300)
    attend = functools.partial(
        pallas_kernels.fused_rope_attention_qkvpacked,
        cu_seqlens=case.cu_seqlens,
        implementation="kernel",
    )
    assert "window_kernel" in str(jax.make_jaxpr(attend)(*case.packed[:-1]))


def test_scale_is_no_array():
    scale = np.array([0.25, 0.25])  # of a single number NumPy 2.2 makes one
    with pytest.raises(ValueError, match=r"scale must be from 2\*\*-100 to 2\*\*100 or None, got "):
        pallas_kernels.fused_rope_attention(*CASE.separate, max_seqlen=7, scale=scale)


@pytest.mark.parametrize("implementation", ["auto", "kernel", "reference"])
def test_a_traced_cu_seqlens_needs_max_seqlen(implementation):
    attend = jax.jit(
        lambda *x: pallas_kernels.fused_rope_attention(*x, implementation=implementation)
    )
    with pytest.raises(ValueError, match="max_seqlen must be given where cu_seqlens is traced"):
        attend(*CASE.separate)


def test_wrong_arguments_are_refused_while_tracing():
    attend = jax.jit(lambda *x: pallas_kernels.fused_rope_attention_qkvpacked(*x, max_seqlen=8))
    qkv, cos, sin, cu_seqlens = CASE.packed
    with pytest.raises(TypeError, match="cos must be float32"):
        attend(qkv, cos.astype(jnp.bfloat16), sin, cu_seqlens)
