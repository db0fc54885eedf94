"""Pallas' Triton dialect, which JAX has deprecated: None where this version of it is without.

Then Mosaic's kernels serve what they serve, and XLA computes the rest.
"""

import jax

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    plgpu = None

HAVE_TRITON = plgpu is not None


def without_triton() -> str:
    """What a user is told where it is missing."""
    return f"JAX {jax.__version__} has no Pallas Triton backend, JAX 0.12 has"
