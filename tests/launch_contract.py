"""Every tile in the tables of launches, whichever GPU it is for, computes what it must.

A CPU's interpreters take the default's launches, and calls as small as tests can make take those of
small calls: other rows would be run on their GPU alone. An implementation's tests inherit
LaunchContract, what KernelContract asks for, and `source`, the arguments by which the package is
told of the GPU.
"""

import importlib
import itertools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.hostile import examples
from tests.kernel_cases import assert_accurate, make_case

_TABLES = [
    json.loads((Path(__file__).parents[1] / package / "launching" / "launches.json").read_text())
    for package in ("triton_kernels", "pallas_kernels")
]
# Segments that begin and end anywhere in a tile, one that spans several, one after another in one,
# and one that ends with a tile of keys.
LENGTHS = (150, 0, 1, 70, 33, 128)


def tiles(kernel):
    """Rows of query and key tiles of a kernel, of all GPUs; of heads that a tile holds."""
    rows = [row for table in _TABLES for device in table.values() for row in device["launches"]]
    rows = [row for row in rows if row["kernel"] == kernel and "columns" not in row]
    return sorted({(row["block"], row["block_k"]) for row in rows})


# Of these each tile meets one in every run, every second with its Q rotated here, and all in a
# thorough one.
_HEADS = [(72, "none"), (80, "q"), (80, "none"), (72, "q"), (128, "none"), (128, "q")]
_PER_TILE = min(examples(1), len(_HEADS))
_heads = itertools.cycle(_HEADS)
_CASES = [(*tile, *next(_heads)) for tile in tiles("stream") for _ in range(_PER_TILE)]


class LaunchContract:
    @pytest.mark.parametrize(("block", "block_k", "head_dim", "fuse"), _CASES)
    def test_tiles_of_the_stream_kernel(self, block, block_k, head_dim, fuse):
        launch = importlib.import_module(f"{self.package.__name__}.launching.choose")
        table = importlib.import_module(f"{self.package.__name__}.launching.table").Table
        row = {"block": block, "block_k": block_k, "num_warps": block // 16, "num_stages": 2}
        rows = [{"kernel": "stream", **row}, {"kernel": "rotate", **row, "block_k": 2}]
        default = {"compute_capability": None, "launches": rows}
        case = make_case(LENGTHS, head_dim=head_dim, heads=1, trailing=3)
        # A bound of the tile's own: JAX compiles anew for it.
        longest = 4096 + block + block_k
        with launch.launching_by(table.from_text(json.dumps({"default": default}))):
            assert_accurate(self.attention(case, max_seqlen=longest, fuse=fuse), case)

    @pytest.mark.parametrize(
        ("head_dim", "fuse", "embed"),
        [(264, "none", "rope"), (512, "q", "sinusoidal"), (320, "qk", "rope")],
    )
    def test_a_wide_head_that_a_tile_holds(self, head_dim, fuse, embed):
        """As on GPUs that have room for it; what is embedded beforehand is so in chunks."""
        launch = importlib.import_module(f"{self.package.__name__}.launching.choose")
        table = importlib.import_module(f"{self.package.__name__}.launching.table").Table
        row = {"block": 16, "block_k": 16, "num_warps": 4, "num_stages": 2}
        rows = [{"kernel": kernel, **row} for kernel in ("stream", "rotating_stream")]
        rows.append({"kernel": "rotate", **row, "block_k": 1, "columns": 128})
        default = {"compute_capability": None, "launches": rows}
        case = make_case((20, 0, 7), head_dim=head_dim, heads=2, embed=embed, trailing=3)
        with launch.launching_by(table.from_text(json.dumps({"default": default}))):
            assert_accurate(self.attention(case, max_seqlen=4096 + head_dim, fuse=fuse), case)

    @pytest.mark.parametrize(
        ("heads", "head_dim", "row"), [(16, 80, 1280), (16, 72, 1280), (3, 72, 256), (1, 8, 64)]
    )
    def test_rows_of_rotated_heads_hold_their_tiles_and_start_at_cache_lines(
        self, heads, head_dim, row
    ):
        launch = importlib.import_module(f"{self.package.__name__}.launching.choose")
        assert launch.rotated_row(heads, head_dim) == row

    @pytest.mark.parametrize(
        ("head_dim", "rotary_dim", "max_seqlen", "fuse"),
        [
            (80, 80, 128, "qk"), (80, 80, 129, "none"), (80, 40, 128, "qk"), (80, 40, 129, "q"),
            (72, 72, 4096, "none"), (72, 36, 4096, "none"), (128, 126, 4096, "q"),
            (192, 192, 128, "qk"), (200, 200, 64, "qk"), (200, 200, 65, "none"),
            (512, 512, 64, "qk"), (512, 512, 65, "none"), (512, 256, 65, "q"),
        ],
    )  # fmt: skip
    def test_how_much_is_fused_by_default(self, head_dim, rotary_dim, max_seqlen, fuse):
        choose = importlib.import_module(f"{self.package.__name__}.launching.choose")
        dtype = self.array(np.zeros(0, ml_dtypes.bfloat16)).dtype
        call = dtype, head_dim, rotary_dim, max_seqlen, 4096, 2
        assert choose.auto_fuse(*call, *self.source) == fuse
