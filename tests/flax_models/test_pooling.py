"""Means over segments in JAX."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from flax_models.pooling import segment_means  # noqa: E402
from tests.pooling_contract import PoolingContract  # noqa: E402


class TestPooling(PoolingContract):
    @staticmethod
    def means(rows, cu_seqlens):
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            return np.asarray(jax.jit(segment_means)(rows, cu_seqlens))
