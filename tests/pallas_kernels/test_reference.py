"""The reference of the JAX package, which nothing checks but what it is itself."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import rope_attention_reference
from tests.rounding_contract import RoundingContract


class TestReference(RoundingContract):
    @staticmethod
    def attend(case, scale):
        arrays = map(jnp.asarray, case.separate)
        return np.asarray(rope_attention_reference(*arrays, scale), np.float32)
