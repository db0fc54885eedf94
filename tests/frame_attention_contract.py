"""What a tower must do whose attention over whole frames is a library's.

The libraries run on GPUs only; here others of the same interface stand for them. A subclass has
what `TowerContract` asks for, and `stand_in(monkeypatch)`, `libraries` and `encode(tower, patches,
layout)`, which takes an unplaced layout.
"""

import importlib
import re

import numpy as np
import pytest

from flax_models import Bucket, plan_layout
from tests.tower_checkpoints import SMALL_TOWERS, random_patches, write_checkpoint
from tests.tower_contract import FP32_TOLERANCE, relative_error, side_by_side

CLIPS = [(3, 4, 6), (1, 6, 4)]  # four frames of 24 tokens


class FrameAttentionContract:
    @pytest.fixture(scope="class", params=["head_dim_16", "qwen3_vl"])
    @classmethod
    def config(cls, request):
        return SMALL_TOWERS[request.param]

    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls, config, tmp_path_factory):
        return write_checkpoint(tmp_path_factory.mktemp("tower"), config)

    @pytest.fixture(scope="class")
    @classmethod
    def fused(cls, directory):
        return cls.load(directory, "float32")

    @pytest.fixture
    def with_library(self, directory, monkeypatch):
        """Load a tower whose frames a stand-in for a library attends over."""
        self.stand_in(monkeypatch)

        def load(library, buckets=None):
            tower = self.load(directory, "float32", token_buckets=buckets)
            tower.frame_attention = library
            return tower

        return load

    @classmethod
    def rows(cls, tower, config, grid):
        return side_by_side(tower(random_patches(config, grid), grid), cls.numpy)

    @pytest.mark.parametrize("buckets", [(96,), (120,)], ids=["full", "a frame of padding"])
    def test_libraries_give_the_same_embeddings(self, config, fused, with_library, buckets):
        expected = self.rows(fused, config, CLIPS)
        for library in self.libraries:
            ours = self.rows(with_library(library, buckets), config, CLIPS)
            assert relative_error(ours, expected) < FP32_TOLERANCE, library

    def test_batch_invariance_is_the_kernels(self, config, directory, fused, monkeypatch):
        tower = self.load(directory, "float32", batch_invariant=True)
        attention = importlib.import_module(
            f"{type(tower).__module__.rpartition('.')[0]}.attention"
        )
        call, asked = attention.fused_rope_attention_qkvpacked, []
        monkeypatch.setattr(
            attention,
            "fused_rope_attention_qkvpacked",
            lambda *x, **y: asked.append(y["batch_invariant"]) or call(*x, **y),
        )
        ours = self.rows(tower, config, CLIPS)
        assert set(asked) == {True}
        assert relative_error(ours, self.rows(fused, config, CLIPS)) < FP32_TOLERANCE
        with pytest.raises(ValueError, match=r"batch_invariant=True needs .*'fused', got 'cudnn'"):
            self.load(directory, "bfloat16", batch_invariant=True, frame_attention="cudnn")

    def test_padding_stays_finite_and_never_leaks(self, config, with_library):
        for library in self.libraries:
            tower = with_library(library, (120,))
            patches, layout = tower.prepare(random_patches(config, CLIPS), CLIPS)
            spoilt = np.array(self.numpy(patches))
            spoilt[layout.num_tokens :] = 1e3
            clean, dirty = (
                side_by_side(self.encode_prepared(tower, values, layout), self.numpy)
                for values in (patches, self.array(spoilt))
            )
            assert np.isfinite(clean).all()
            np.testing.assert_array_equal(clean[:24], dirty[:24])

    def test_frames_of_several_lengths_are_refused_by_what_needs_one(self, config, with_library):
        grid = [(1, 4, 6), (1, 8, 8)]
        message = r"'cudnn' needs frames of one length, got .* 24 to 64 tokens: use 'fused'"
        with pytest.raises(ValueError, match=message):
            self.rows(with_library("cudnn"), config, grid)

    def test_padding_by_part_of_a_frame_is_refused(self, config, with_library):
        message = "whole frames of 24 tokens, .* from 96 to 100: .* use 'fused'"
        with pytest.raises(ValueError, match=message):
            self.rows(with_library("cudnn", (100,)), config, CLIPS)

    @pytest.mark.parametrize("grid", [[(1, 4, 6), (1, 4, 8)], [(1, 4, 8), (1, 4, 6)]])
    def test_a_layout_of_other_frames_gives_no_numbers(self, config, with_library, grid):
        """Its bucket could hold two frames of 32 tokens, but one of them is shorter."""
        patches = np.pad(random_patches(config, grid), ((0, 8), (0, 0)))
        layout = plan_layout(config, grid, Bucket(64, windows=16, frames=2, frame_tokens=32))
        tower = with_library("cudnn")
        assert np.isnan(side_by_side(self.encode(tower, patches, layout), self.numpy)).all()
        layout = plan_layout(config, grid, Bucket(64, windows=16, frames=3, frame_tokens=32))
        with pytest.raises(ValueError, match=r"got 64 tokens in 3 frames: .* or use 'fused'"):
            self.encode(tower, patches, layout)

    def test_unknown_names_are_refused(self, directory):
        message = re.escape(f"one of fused, {', '.join(self.libraries)}, got 'flash'")
        with pytest.raises(ValueError, match=message):
            self.load(directory, "float32", frame_attention="flash")
        with pytest.raises(ValueError, match=r"implementation must be one of .*got 'cuda'"):
            self.load(directory, "float32", implementation="cuda")

    def test_libraries_are_refused_without_a_gpu(self, directory):
        for library in self.libraries:
            message = f"frame_attention='{library}' needs a tower on a GPU, got device 'cpu'"
            with pytest.raises(ValueError, match=message):
                self.load(directory, "bfloat16", device="cpu", frame_attention=library)

    @pytest.mark.gpu
    def test_libraries_on_the_gpu(self, config, directory):
        fused = self.rows(self.load(directory, "bfloat16"), config, CLIPS)
        exact = self.rows(self.load(directory, "float32"), config, CLIPS)
        for library in self.libraries:
            try:
                tower = self.load(
                    directory, "bfloat16", frame_attention=library, token_buckets=(96, 120)
                )
            except ValueError:
                assert library == "fa3"  # the others are part of the frameworks
                continue
            ours = self.rows(tower, config, CLIPS)
            assert relative_error(ours, exact) <= 1.5 * relative_error(fused, exact), library
