"""The JAX side of the contract suites: NumPy in, NumPy out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels

ON_CPU = jax.default_backend() == "cpu"


def public_function(packed, options):
    """The function with these (name, value) pairs as its keywords."""
    if packed:
        function = pallas_kernels.fused_rope_attention_qkvpacked
    else:
        function = pallas_kernels.fused_rope_attention
    return functools.partial(function, **dict(options))


@functools.cache
def jitted(packed, options, alike):
    """Jitted once for all tests that use these keywords."""
    # On a CPU XLA fuses elementwise operations, here so and there so, and a sum of products is
    # rounded once where they meet in one loop.
    compiler_options = {"xla_disable_hlo_passes": "fusion"} if alike and ON_CPU else None
    return jax.jit(public_function(packed, options), compiler_options=compiler_options)


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
        if ("max_seqlen", None) in options:  # not under jit
            function = public_function(packed, options)
        else:
            function = jitted(packed, options, alike)
        norms = {name: jnp.asarray(x) for name, x in case.norms.items()}
        return np.array(function(*map(jnp.asarray, arguments), **norms))

    def check_cu_seqlens(self, cu_seqlens, *arguments):
        pallas_kernels.check_cu_seqlens(jnp.asarray(cu_seqlens), *arguments)
