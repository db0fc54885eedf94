"""The JAX side of the contract suites: NumPy in, NumPy out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels

# On a CPU the tests compile much and run little. (A GPU's options would go to its own compiler.)
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


@functools.cache
def jitted(packed, options):
    """The public function with these keywords, jitted once for all tests that use them."""
    if packed:
        function = pallas_kernels.fused_rope_attention_qkvpacked
    else:
        function = pallas_kernels.fused_rope_attention
    function = functools.partial(function, **dict(options))
    return jax.jit(function, compiler_options=COMPILER_OPTIONS)


class JaxAdapter:
    """Memory that a kernel leaves unwritten is NaN: Pallas' interpreter fills it so."""

    implementation: str
    package = pallas_kernels
    array = staticmethod(jnp.asarray)

    def attention(self, case, packed=False, **options):
        arguments = case.packed if packed else case.separate
        options = {"implementation": self.implementation, **options}
        function = jitted(packed, tuple(sorted(options.items())))
        if options.get("max_seqlen") is None:  # not under jit
            function = function.__wrapped__
        return np.array(function(*map(jnp.asarray, arguments)))

    def check_cu_seqlens(self, cu_seqlens, *arguments):
        pallas_kernels.check_cu_seqlens(jnp.asarray(cu_seqlens), *arguments)
