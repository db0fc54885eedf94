"""The towers' matrix products, which XLA has cuBLAS compute."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flax_models.common.weights import unnormed_dtype


def product(x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x weight^T, rounded to `dtype` once; [rows, in] and [out, in]."""
    # The default precision of fp32 products on a GPU is TF32: an fp32 tower means fp32.
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    axes = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, axes, precision, preferred_element_type=dtype)


def unnormed_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x weight^T; of fp16 in fp32, because rows that no norm has divided are too large for fp16."""
    return product(x, weight, unnormed_dtype(x.dtype))
