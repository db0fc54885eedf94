"""Means over segments in PyTorch."""

import pytest

torch = pytest.importorskip("torch")

from compare.torch_tower.pooling import segment_means  # noqa: E402
from tests.pooling_contract import PoolingContract  # noqa: E402


class TestPooling(PoolingContract):
    @staticmethod
    def means(rows, cu_seqlens):
        return segment_means(torch.from_numpy(rows), torch.from_numpy(cu_seqlens)).numpy()
