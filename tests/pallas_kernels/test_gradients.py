"""Derivatives through pallas_kernels."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import pallas_kernels
from tests.kernel_cases import make_case, relative_rms
from tests.kernel_gradient_contract import (
    GradientContract,
    KernelGradientContract,
    LongGradientContract,
)
from tests.pallas_kernels.adapter import JaxAdapter, assert_log_sum_exps, public_function


@functools.cache
def differentiated(packed, wanted, options):
    """A function of (weights, norms, rest, *arguments), jitted once for all tests with its form."""
    function = public_function(packed, options)

    @jax.jit
    def gradients(weights, norms, rest, *arguments):
        _, pull = jax.vjp(lambda norms, *x: function(*x, *rest, **norms), norms, *arguments)
        norms, *found = pull(weights)
        return *found, norms

    return gradients


class JaxGradients(JaxAdapter):
    def gradients(self, case, weights, packed=False, angles=True, **options):
        arguments = list(map(jnp.asarray, case.packed if packed else case.separate))
        wanted = len(arguments) - (1 if angles else 3)
        options = {"implementation": self.implementation, **options}
        gradients = differentiated(packed, wanted, tuple(sorted(options.items())))
        norms = jax.tree.map(jnp.asarray, case.norms)
        rest = arguments[wanted:]
        *found, norms = gradients(jnp.asarray(weights), norms, rest, *arguments[:wanted])
        return [np.array(x) for x in (*found, *(norms[name] for name in case.norms))]

    def curvature(self, case, weights, direction, **options):
        options |= jax.tree.map(jnp.asarray, case.norms)
        function = public_function(False, {"implementation": self.implementation, **options})
        arguments = list(map(jnp.asarray, case.separate))
        arguments, rest = arguments[: len(direction)], arguments[len(direction) :]

        def along(scalar):
            def value(*arguments):
                gradients = jax.grad(scalar, argnums=tuple(range(len(direction))))(*arguments)
                return sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))

            return value

        def total(*arguments):
            return (function(*arguments, *rest) * weights).sum()

        compiled = jax.jit(along(along(total)))
        return float(compiled(*arguments))


class TestKernel(JaxGradients, KernelGradientContract):
    implementation = "kernel"


class TestReference(JaxGradients, GradientContract, LongGradientContract):
    implementation = "reference"


@pytest.mark.parametrize("max_seqlen", [16, 4096])
def test_what_a_forward_pass_keeps(max_seqlen):
    """Of short segments nothing but its inputs; of long ones the result and a number a row."""
    case = make_case((9, 14), heads=3, head_dim=16)
    arguments = list(map(jnp.asarray, case.packed))
    attend = public_function(True, {"implementation": "kernel", "max_seqlen": max_seqlen})
    qkv, *rest = arguments
    _, pull = jax.eval_shape(lambda qkv: jax.vjp(lambda x: attend(x, *rest), qkv), qkv)
    kept = sorted((x.shape, x.dtype.name) for x in jax.tree.leaves(pull))
    others = [((3, 23), "float32"), ((23, 3, 16), "bfloat16")] if max_seqlen == 4096 else []
    assert kept == sorted([*((x.shape, x.dtype.name) for x in arguments), *others])


@pytest.mark.parametrize(
    ("max_seqlen", "options"),
    [(4096, {"batch_invariant": True}), (512, {"fuse": "q"})],
    ids=str,
)
def test_log_sum_exps(max_seqlen, options):
    """Also of rows that their reference does not fit, which are computed again."""
    case = make_case((9, 150), heads=1, head_dim=16, leading=2, trailing=3)
    case.qkv[100:, 1] *= 40
    assert_log_sum_exps(case, max_seqlen, **options)


@pytest.mark.parametrize("implementation", ["kernel", "reference"])
def test_forward_mode_is_refused(implementation):
    *arguments, cu_seqlens = map(jnp.asarray, make_case([5], head_dim=16).packed)
    attend = public_function(True, {"implementation": implementation, "max_seqlen": 8})
    with pytest.raises(TypeError, match=r"forward-mode .*custom_vjp"):
        jax.jvp(lambda *x: attend(*x, cu_seqlens), arguments, arguments)


def test_gradients_cost_as_much_for_each_segment_however_many_there_are():
    """What a step makes, beside the sums that it adds to, is as large as a segment, not as all."""
    arguments = list(map(jnp.asarray, make_case([8] * 40, heads=1, head_dim=8).separate))
    attend = public_function(False, {"implementation": "reference", "max_seqlen": 8})
    gradients = jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), range(5))
    steps = loop_bodies(jax.make_jaxpr(gradients)(*arguments).jaxpr)
    made = [equation for step in steps for equation in innermost(step)]
    large = {e.primitive.name for e in made if size(e.outvars) >= arguments[0].size}
    assert large == {"scatter", "scatter-add"}  # in place, into the result and into gradients


def loop_bodies(jaxpr):
    for equation in jaxpr.eqns:
        for inner in jaxprs_in_params(equation.params):
            yield from [inner] if equation.primitive.name == "scan" else loop_bodies(inner)


def innermost(jaxpr):
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        if inner and not equation.primitive.name.startswith("scatter"):
            yield from (e for each in inner for e in innermost(each))
        else:
            yield equation


def size(variables):
    return max((variable.aval.size for variable in variables), default=0)


def test_gradients_take_less_memory_than_the_probabilities_of_one_segment():
    """In one segment beside eight empty ones, as a tower's bucket has them."""
    tokens, segments, heads, head_dim = 1024, 9, 4, 16
    attend = public_function(True, {"implementation": "reference", "max_seqlen": tokens})
    gradient = jax.jit(jax.grad(lambda *x: attend(*x).sum()))
    angles = jax.ShapeDtypeStruct((tokens, head_dim // 2), jnp.float32)
    qkv = jax.ShapeDtypeStruct((tokens, 3, heads, head_dim), jnp.float32)
    cu_seqlens = jax.ShapeDtypeStruct((segments + 1,), jnp.int32)
    compiled = gradient.lower(qkv, angles, angles, cu_seqlens).compile()
    probabilities = heads * tokens * tokens * 4
    assert compiled.memory_analysis().temp_size_in_bytes < probabilities


@pytest.mark.parametrize("by_positions", [False, True])
def test_gradients_of_sinusoidal_embeddings(by_positions):
    """By JAX of the same computed step by step."""
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.standard_normal((6, 3, 1, 264), np.float32))
    positions, bounds = jnp.arange(6, dtype=jnp.int32), (0, 4, 6)
    cos, sin = pallas_kernels.sinusoidal_tables(positions, 264)
    tables, further = (cos, sin), {}
    if by_positions:
        tables, further = (None, None), {"positions": positions}

    def fused(qkv):
        cu_seqlens = jnp.asarray(bounds, jnp.int32)
        out = pallas_kernels.fused_sinusoidal_attention_qkvpacked(
            qkv, *tables, cu_seqlens, max_seqlen=16, implementation="kernel", **further
        )
        return (out**2).sum()

    def separate(qkv):
        added = (
            jnp.zeros((6, 1, 264)).at[..., ::2].set(sin[:, None]).at[..., 1::2].set(cos[:, None])
        )
        q, k, v = qkv[:, 0] + added, qkv[:, 1] + added, qkv[:, 2]
        total = 0.0
        for start, end in itertools.pairwise(bounds):
            rows = slice(start, end)
            p = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q[rows], k[rows]) * 264**-0.5)
            total += (jnp.einsum("hqk,khd->qhd", p, v[rows]) ** 2).sum()
        return total

    found = jax.grad(fused)(qkv)
    with jax.default_matmul_precision("highest"):  # a GPU's default is tf32
        expected = jax.grad(separate)(qkv)
    assert relative_rms(np.asarray(found), np.asarray(expected)) < 1e-5
