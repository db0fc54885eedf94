"""The JAX side of the contract suites: NumPy in, NumPy out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import attention
from pallas_kernels.checks import NO_NORMS, NORM_EPS
from tests.kernel_cases import assert_same_bits, log_sum_exps

ON_CPU = jax.default_backend() == "cpu"


def public_function(packed, options, embedding="rope"):
    """The function with these (name, value) pairs as its keywords."""
    form = "_qkvpacked" if packed else ""
    function = getattr(pallas_kernels, f"fused_{embedding}_attention{form}")
    return functools.partial(function, **dict(options))


@functools.cache
def jitted(packed, options, alike, embedding="rope"):
    """Jitted once for all tests that use these keywords."""
    # On a CPU XLA fuses elementwise operations, here so and there so, and a sum of products is
    # rounded once where they meet in one loop.
    compiler_options = {"xla_disable_hlo_passes": "fusion"} if alike and ON_CPU else None
    function = public_function(packed, options, embedding)
    return jax.jit(function, compiler_options=compiler_options)


def assert_log_sum_exps(case, max_seqlen, **options):
    """Those that a forward pass keeps, and that its result has the same bits with and without."""
    options = {"fuse": "auto", "batch_invariant": False, "max_seqlen": max_seqlen} | options
    options |= {"scale": case.qkv.shape[-1] ** -0.5, "norm_eps": NORM_EPS, "embed": "rope"}
    attend = functools.partial(attention.attend, interpret=ON_CPU, **options)
    arguments = (jnp.asarray(case.qkv),), NO_NORMS, *map(jnp.asarray, case.packed[1:])
    [without] = jax.jit(attend)(*arguments)
    out, found = jax.jit(functools.partial(attend, keeps_lse=True))(*arguments)
    np.testing.assert_allclose(found, log_sum_exps(case), rtol=1e-3, atol=1e-2)
    assert_same_bits(np.asarray(out), np.asarray(without))


class JaxAdapter:
    """Memory that a kernel leaves unwritten is NaN: Pallas' interpreter fills it so."""

    implementation: str
    package = pallas_kernels
    source = ()
    array = staticmethod(jnp.asarray)

    def attention(self, case, packed=False, alike=False, **options):
        """One call; alike: programs of one computation are to round alike."""
        arguments = case.packed if packed else case.separate
        if self.implementation == "reference":
            options.pop("fuse", None)  # nothing to fuse: no other program to compile
        options = {"implementation": self.implementation, **options}
        options = tuple(sorted(options.items()))
        embedding = "sinusoidal" if case.is_sinusoidal else "rope"
        if ("max_seqlen", None) in options:  # not under jit
            function = public_function(packed, options, embedding)
        else:
            function = jitted(packed, options, alike, embedding)
        further = {name: jnp.asarray(x) for name, x in case.norms.items()}
        *tensors, cu_seqlens = map(jnp.asarray, arguments)
        if case.positions is not None:
            further, tensors[-2:] = {"positions": jnp.asarray(case.positions)}, (None, None)
        return np.array(function(*tensors, cu_seqlens, **further))

    def check_cu_seqlens(self, cu_seqlens, *arguments):
        pallas_kernels.check_cu_seqlens(jnp.asarray(cu_seqlens), *arguments)
