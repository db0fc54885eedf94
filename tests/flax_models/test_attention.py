"""The Flax tower with a library's attention over whole frames."""

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from flax_models import attention, encode, load_vision_tower  # noqa: E402
from tests.frame_attention_contract import FrameAttentionContract  # noqa: E402
from tests.tower_checkpoints import random_patches  # noqa: E402
from tests.tower_contract import FP32_TOLERANCE, relative_error  # noqa: E402


class TestFrameAttention(FrameAttentionContract):
    libraries = attention.FRAME_ATTENTION[1:]
    load = staticmethod(load_vision_tower)
    array = staticmethod(jnp.asarray)
    encode = staticmethod(jax.jit(encode))
    encode_prepared = encode

    @staticmethod
    def numpy(array):
        return np.asarray(array, np.float32)

    @pytest.fixture(autouse=True)
    def exact_products(self):
        """The stand-in multiplies as JAX does by default, on a GPU in tf32."""
        with jax.default_matmul_precision("highest"):
            yield

    @staticmethod
    def stand_in(monkeypatch):
        monkeypatch.setattr(attention, "_CUDNN", "xla")

    def test_one_image_may_be_padded(self, config, fused, with_library):
        tower = with_library("cudnn", (128,))
        for grid in ([(1, 6, 10)], [(1, 2, 2)], [(1, 8, 16)]):
            ours = self.rows(tower, config, grid)
            assert relative_error(ours, self.rows(fused, config, grid)) < FP32_TOLERANCE

    def test_one_compilation_serves_every_image_of_a_bucket(
        self, config, with_library, compilations
    ):
        tower = with_library("cudnn", (144,))
        self.rows(tower, config, [(1, 6, 10)])
        compilations.clear()
        for grid in ([(1, 2, 2)], [(1, 12, 12)]):
            tower(random_patches(config, grid), grid)
        assert not compilations
