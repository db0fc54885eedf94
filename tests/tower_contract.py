"""What every tower must do; the tests of each tower inherit these suites.

A subclass has `load(directory, dtype, **options)`, which returns its tower, `numpy(array)`, which
makes an fp32 NumPy array of the tower's own, and `module`, where the tower's class is. Each suite
runs on every family's tower.
"""

import gc
import json
import re
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from flax_models import CheckpointError, plan_layout
from tests.tower_checkpoints import (
    GRIDS,
    SMALL_TOWERS,
    HuggingFaceTower,
    config_json,
    random_patches,
    random_tensors,
    save_hugging_face_tower,
    write_checkpoint,
)

FP32_TOLERANCE = 1e-5  # relative RMS against Hugging Face in fp32; the contract asks for 1e-4
BF16_FACTOR = 1.1  # of the error of Hugging Face's own bf16 tower
FP16_FACTOR = 2  # of its fp16 tower's

CONFIG = SMALL_TOWERS["head_dim_16"]
# Whose code differs. Their successors' differs in what they read, which one test of each shows.
each_family = pytest.mark.parametrize(
    "config", ["head_dim_80", "head_dim_16", "qwen2_vl", "qwen3_vl"], indirect=True
)


def relative_error(ours, theirs):
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def in_raster_order(config, grid, rows):
    """Patches [tokens, channels] of window order, image by image as [t, h, w, channels]."""
    merge, channels = config.spatial_merge_size, rows.shape[-1]
    unwindowed = np.empty_like(rows)
    unwindowed[plan_layout(config, grid).window_order] = rows
    images = []
    for t, h, w in grid:
        image, unwindowed = np.split(unwindowed, [t * h * w])
        units = image.reshape(t, h // merge, w // merge, merge, merge, channels)
        images.append(units.swapaxes(2, 3).reshape(t, h, w, channels))
    return images


def side_by_side(result, numpy=np.asarray):
    """What a tower returns as one array: DeepStack's features in columns beside the embeddings."""
    embeddings, features = result if isinstance(result, tuple) else (result, ())
    return np.concatenate([numpy(rows) for rows in (embeddings, *features)], axis=1)


class TowerContract:
    """What a tower must do by itself; needs neither PyTorch nor transformers."""

    @pytest.fixture(scope="class", params=["head_dim_16", "qwen2_vl", "qwen3_vl"])
    @classmethod
    def config(cls, request):
        return SMALL_TOWERS[request.param]

    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls, config, tmp_path_factory):
        return write_checkpoint(tmp_path_factory.mktemp("tower"), config)

    @classmethod
    def run(cls, tower, patches, grid):
        """Everything that a call returns, side by side, as fp32 NumPy array."""
        return side_by_side(tower(patches, grid), cls.numpy)

    @pytest.fixture(scope="class")
    @classmethod
    def tower(cls, directory):
        return cls.load(directory, "float32")

    def test_shape_and_dtype(self, config, directory):
        grid = GRIDS["mix"]
        patches = random_patches(config, grid)
        for dtype in ("float32", "bfloat16", "float16"):
            result = self.load(directory, dtype)(patches, grid)
            embeddings, features = result if config.deepstack_visual_indexes else (result, ())
            assert len(features) == len(config.deepstack_visual_indexes)
            for rows in (embeddings, *features):
                assert tuple(rows.shape) == (len(patches) // 4, config.out_hidden_size)
                assert dtype in str(rows.dtype)
                assert np.isfinite(self.numpy(rows)).all()

    def test_images_do_not_see_each_other(self, config, tower):
        grid = np.array(GRIDS["mix"])
        patches = random_patches(config, grid)
        together = self.run(tower, patches, grid)
        ends = np.cumsum(grid.prod(axis=1))
        alone = [
            self.run(tower, patches[end - image.prod() : end], image[None])
            for image, end in zip(grid, ends, strict=True)
        ]
        assert relative_error(together, np.concatenate(alone)) < FP32_TOLERANCE

    @pytest.mark.parametrize("changed", [0, 5, 70, 239])
    def test_a_patch_moves_exactly_its_window_then_its_frame(self, config, tower, changed):
        grid = [(2, 10, 12)]  # four windows a frame, three of them cut by an edge
        layout = plan_layout(config, grid)
        before = random_patches(config, grid)
        after = before.copy()
        after[changed] += 1
        row = int(np.flatnonzero(layout.window_order == changed)[0])
        states = zip(
            tower.hidden_states(before, grid), tower.hidden_states(after, grid), strict=True
        )
        for block, (old, new) in enumerate(states):
            if config.family.windows and block < 2:  # block 2 is the first to see whole frames
                bounds = layout.cu_window_seqlens
            else:
                bounds = layout.cu_frame_seqlens
            segment = np.searchsorted(bounds, row, side="right")
            expected = np.arange(bounds[segment - 1], bounds[segment])
            moved = (self.numpy(old) != self.numpy(new)).any(axis=1)
            np.testing.assert_array_equal(np.flatnonzero(moved), expected)

    def test_embeddings_and_features_are_made_of_the_hidden_states(self, config, tower):
        grid = GRIDS["edge_windows"]
        patches = random_patches(config, grid)
        states = list(tower.hidden_states(patches, grid))
        assert len(states) == config.depth
        for kept, state in zip(states, tower.hidden_states(patches, grid), strict=True):
            np.testing.assert_array_equal(self.numpy(kept), self.numpy(state))
        layout = plan_layout(config, grid)
        blocks = (config.depth - 1, *config.deepstack_visual_indexes)
        mergers = (tower.merger, *tower.deepstack_mergers)
        merged = [
            self.numpy(merger(states[block]))[layout.output_order]
            for block, merger in zip(blocks, mergers, strict=True)
        ]
        ours = self.run(tower, patches, grid)
        assert relative_error(ours, np.concatenate(merged, axis=1)) < FP32_TOLERANCE

    def test_the_table_of_positions_is_stretched_over_each_frame(self, config, tower):
        if not config.family.position_table:
            assert tower.position_table is None
            return
        grid = [(1, 6, 10), (2, 2, 14)]
        positions = plan_layout(config, grid).positions
        table = self.numpy(tower.position_table.weight).reshape(9, 9, -1)
        corner = np.array([(h, w) for t, h, w in grid for _ in range(t * h * w)]) - 1
        row, column = (positions * 8 / corner).T
        low_row, low_column = np.minimum([row.astype(int), column.astype(int)], 7)
        down, right = (row - low_row)[:, None], (column - low_column)[:, None]
        expected = (
            (1 - down) * (1 - right) * table[low_row, low_column]
            + (1 - down) * right * table[low_row, low_column + 1]
            + down * (1 - right) * table[low_row + 1, low_column]
            + down * right * table[low_row + 1, low_column + 1]
        )
        _, layout = tower.prepare(random_patches(config, grid), grid)
        ours = self.numpy(tower.position_table(layout.positions, layout.frame_sizes))
        np.testing.assert_allclose(ours[: len(positions)], expected, atol=1e-5)
        assert np.isfinite(ours).all()

    def test_patches_are_the_last_hidden_state_in_raster_order(self, config, tower):
        grid = GRIDS["mix"]
        patches = random_patches(config, grid)
        *_, state = tower.hidden_states(patches, grid)
        images = in_raster_order(config, grid, self.numpy(state))
        ours = self.numpy(tower(patches, grid, output="patches"))
        rows = [image.reshape(-1, config.hidden_size) for image in images]
        assert relative_error(ours, np.concatenate(rows)) < FP32_TOLERANCE
        pooled = self.numpy(tower(patches, grid, output="pooled"))
        assert relative_error(pooled, np.stack([image.mean(axis=0) for image in rows])) < 1e-5

    @pytest.mark.parametrize("output", [None, "patch", ["patches"]])
    def test_unknown_outputs(self, config, tower, output):
        grid = [(1, 2, 2)]
        patches = random_patches(config, grid)
        message = "output must be one of embeddings, patches, pooled, got "
        for method, rows in (
            (tower, patches),
            (tower.prepare, patches),
            (tower.non_finite_images, self.array(patches)),
        ):
            with pytest.raises(ValueError, match=message):
                method(rows, grid, output=output)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_same_input_same_bits(self, config, directory, dtype):
        grid = GRIDS["mix"]
        patches = random_patches(config, grid)
        first = self.run(self.load(directory, dtype), patches, grid)
        again = self.run(self.load(directory, dtype), patches.copy(), grid)
        np.testing.assert_array_equal(first, again)

    @pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
    def test_whole_model_checkpoints_hold_the_same_tower(self, config, tower, tmp_path, prefix):
        whole = self.load(write_checkpoint(tmp_path, config, prefix), "float32")
        grid = GRIDS["edge_windows"]
        patches = random_patches(config, grid)
        np.testing.assert_array_equal(
            self.run(whole, patches, grid), self.run(tower, patches, grid)
        )

    def test_an_omni_models_checkpoint_holds_its_thinkers_tower(self, tmp_path):
        config, grid = SMALL_TOWERS["qwen2_5_omni"], GRIDS["smaller_than_a_window"]
        patches = random_patches(config, grid)
        alone, whole = (
            self.run(self.load(directory, "float32"), patches, grid)
            for directory in (
                write_checkpoint(tmp_path / "alone", config),
                write_checkpoint(tmp_path / "whole", config, "thinker.visual."),
            )
        )
        np.testing.assert_array_equal(alone, whole)

    def test_input_may_be_of_any_kind(self, config, tower):
        grid = GRIDS["clip"]
        patches = random_patches(config, grid)
        expected = self.run(tower, patches, grid)
        patches.flags.writeable = False
        for kind in (patches, self.array(patches), patches.astype(np.float64)):
            for grid_kind in (np.array(grid), self.array(np.array(grid, np.int32))):
                np.testing.assert_array_equal(self.run(tower, kind, grid_kind), expected)

    def test_tells_which_images_are_not_finite(self, config, tower):
        grid = np.array(GRIDS["mix"])
        ends = np.cumsum(grid.prod(axis=1))
        patches = random_patches(config, grid)
        assert tower.non_finite_images(tower(patches, grid), grid) == []
        for value, wrong in ((np.nan, [0]), (np.inf, [2]), (-np.inf, [1, 3])):
            changed = patches.copy()
            changed[ends[wrong] - 1, 0] = value
            result = tower(changed, grid)
            for kind in (grid, self.array(grid)):
                assert tower.non_finite_images(result, kind) == wrong
        with pytest.raises(ValueError, match="asks for 1 rows of embeddings, got"):
            tower.non_finite_images(result, [(1, 2, 2)])

    @pytest.mark.parametrize("output", ["patches", "pooled"])
    def test_tells_which_images_of_other_outputs_are_not_finite(self, config, tower, output):
        grid = np.array(GRIDS["mix"])
        patches = random_patches(config, grid)
        patches[np.cumsum(grid.prod(axis=1))[[1, 2]] - 1, 0] = np.nan
        result = tower(patches, grid, output=output)
        assert tower.non_finite_images(result, grid, output=output) == [1, 2]
        with pytest.raises(ValueError, match="asks for 111 rows of embeddings, got"):
            tower.non_finite_images(result, grid)

    def test_tells_of_features_that_are_not_finite(self, config, tower):
        grid = GRIDS["mix"]
        result = tower(random_patches(config, grid), grid)
        embeddings, features = result if isinstance(result, tuple) else (result, ())
        for index in range(len(features)):
            changed = [rows if i != index else rows * np.nan for i, rows in enumerate(features)]
            assert tower.non_finite_images((embeddings, tuple(changed)), grid) == [0, 1, 2, 3]

    def test_tells_of_fp16_that_is_too_narrow(self, config, tmp_path):
        """As the residual stream of published towers is for some images."""
        directory = write_checkpoint(tmp_path, config)
        tensors = load_file(directory / "model.safetensors")
        for block in range(config.depth):
            tensors[f"blocks.{block}.mlp.{config.family.mlp_output}.bias"][5] = 4e4
        save_file(tensors, directory / "model.safetensors")
        patches, grid = random_patches(config, GRIDS["mix"]), GRIDS["mix"]
        for dtype, expected in (("float16", [0, 1, 2, 3]), ("bfloat16", [])):
            tower = self.load(directory, dtype)
            assert tower.non_finite_images(tower(patches, grid), grid) == expected

    def test_pixel_values_that_do_not_match_the_grid(self, config, tower):
        dim = config.patch_dim
        for shape in ((59, dim), (60, dim - 1), (60 * dim,)):
            message = re.escape(f"[60, {dim}]") + ".* got " + re.escape(str(list(shape)))
            with pytest.raises(ValueError, match=message):
                tower(np.zeros(shape, np.float32), [(1, 6, 10)])

    def test_pixel_values_must_be_floating(self, config, tower):
        with pytest.raises(TypeError, match=r"floating-point, got .*uint8"):
            tower(np.zeros((60, config.patch_dim), np.uint8), [(1, 6, 10)])

    @pytest.mark.parametrize(
        ("grid", "message"),
        [
            ([(1, 6, 9)], r"image 0 .*w=9.* divisible"),
            ([(1, 6, 0)], r"at least 1"),
            ([(6, 10)], r"\[images, 3\]"),
            ([(1.0, 6.0, 10.0)], "integers"),
        ],
    )
    def test_wrong_grids(self, config, tower, grid, message):
        with pytest.raises(ValueError, match=message):
            tower(np.zeros((60, config.patch_dim), np.float32), grid)

    def test_a_million_tokens_that_do_not_fit_are_refused(self, config, tower, monkeypatch):
        monkeypatch.setattr(f"{self.module}.free_memory", lambda *_: 1 << 30)
        message = r"1,048,576 tokens needs about \d\.\d GiB .* 1\.0 GiB"
        with pytest.raises(MemoryError, match=message):
            tower(np.zeros((1, config.patch_dim), np.float32), [(1024, 32, 32)])

    def test_layouts_that_are_not_remembered_leave_the_device(self, config, tower, monkeypatch):
        monkeypatch.setattr("flax_models.common.layout._CACHED_TOKENS", 0)
        if hasattr(tower, "graphs"):
            monkeypatch.setattr(tower, "graphs", None)  # a recording keeps its last one
        made = []

        def planned(*arguments):
            layout = plan_layout(*arguments)
            made.append(weakref.ref(layout))
            return layout

        monkeypatch.setattr(f"{self.module}.plan_layout", planned)
        grid = GRIDS["clip"]
        tower(random_patches(config, grid), grid)
        gc.collect()
        assert [layout() for layout in made] == [None]

    @pytest.mark.parametrize("head_dim", [12, 264])
    def test_heads_that_the_attention_refuses(self, tmp_path, head_dim):
        """Before weights are read, of which there are none here."""
        changed = replace(CONFIG, hidden_size=head_dim * CONFIG.num_heads)
        (tmp_path / "config.json").write_text(json.dumps(config_json(changed)), encoding="utf-8")
        with pytest.raises(ValueError, match=f"multiple of 8, up to 256, got {head_dim}"):
            self.load(tmp_path, "float32")

    def test_missing_checkpoint(self, tmp_path):
        with pytest.raises(CheckpointError, match="nowhere"):
            self.load(tmp_path / "nowhere", "float32")

    def test_a_device_that_is_not_there(self, directory):
        if self.has_gpu():
            pytest.skip("there is a GPU")
        with pytest.raises(ValueError, match="'cuda' was asked for"):
            self.load(directory, "float32", device="cuda")

    def test_unsupported_dtype(self, directory):
        with pytest.raises(ValueError, match=r"dtype must be one of .*float64"):
            self.load(directory, "float64")

    @pytest.mark.parametrize("token_buckets", [1024, [], "1024", [1024.0], [1022, 2048], [-4]])
    def test_bad_buckets_are_refused_on_loading(self, directory, token_buckets):
        with pytest.raises(ValueError, match="token_buckets must be positive multiples of"):
            self.load(directory, "float32", token_buckets=token_buckets)

    def test_progress_goes_to_standard_error(self, directory, capsys):
        self.load(directory, "float32", progress=False)
        assert capsys.readouterr() == ("", "")
        self.load(directory, "float32", progress=True)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "reading weights" in captured.err

    def test_a_process_without_standard_error(self, directory, monkeypatch):
        monkeypatch.setattr("sys.stderr", None)  # as under pythonw, and where it was closed
        self.load(directory, "float32")


class HuggingFaceContract:
    """Equality with Hugging Face's tower on checkpoints that it saved itself."""

    @pytest.fixture(scope="class", params=SMALL_TOWERS)
    @classmethod
    def config(cls, request):
        return SMALL_TOWERS[request.param]

    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls, config, tmp_path_factory):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        return save_hugging_face_tower(tmp_path_factory.mktemp("hugging_face"), config)

    @pytest.fixture(scope="class")
    @classmethod
    def hugging_face(cls, directory):
        return HuggingFaceTower(directory)

    @pytest.fixture(scope="class")
    @classmethod
    def tower(cls, directory):
        return cls.load(directory, "float32")

    @pytest.mark.parametrize("grid", ["edge_windows", "mix"])
    def test_fp32_equals_hugging_face_after_each_block(self, config, hugging_face, tower, grid):
        grid = GRIDS[grid]
        patches = random_patches(config, grid)
        theirs, their_states = hugging_face.run(patches, grid)
        ours = side_by_side(tower(patches, grid), self.numpy)
        assert relative_error(ours, theirs) < FP32_TOLERANCE
        our_states = tower.hidden_states(patches, grid)
        for our_state, their_state in zip(our_states, their_states, strict=True):
            assert relative_error(self.numpy(our_state), their_state) < FP32_TOLERANCE

    @each_family
    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(
        grid=st.lists(
            st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)).map(
                lambda image: (image[0], 2 * image[1], 2 * image[2])
            ),
            min_size=1,
            max_size=3,
        )
    )
    def test_fp32_equals_hugging_face_on_any_grid(self, config, hugging_face, tower, grid):
        patches = random_patches(config, grid, seed=1)
        ours = side_by_side(tower(patches, grid), self.numpy)
        assert relative_error(ours, hugging_face(patches, grid)) < FP32_TOLERANCE

    @each_family
    def test_patches_are_hugging_faces_in_raster_order(self, config, hugging_face, tower):
        grid = GRIDS["mix"]
        patches = random_patches(config, grid)
        images = in_raster_order(config, grid, hugging_face.run(patches, grid)[1][-1])
        theirs = np.concatenate([image.reshape(-1, config.hidden_size) for image in images])
        ours = self.numpy(tower(patches, grid, output="patches"))
        assert relative_error(ours, theirs) < FP32_TOLERANCE

    def test_features_of_blocks_that_are_not_there(self, tmp_path):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        indexes = (1, SMALL_TOWERS["qwen3_vl"].depth)
        config = replace(SMALL_TOWERS["qwen3_vl"], deepstack_visual_indexes=indexes)
        save_hugging_face_tower(tmp_path, config)
        patches, grid = random_patches(config, GRIDS["clip"]), GRIDS["clip"]
        ours = self.load(tmp_path, "float32")(patches, grid)
        assert len(ours[1]) == 1
        theirs = HuggingFaceTower(tmp_path)(patches, grid)
        assert relative_error(side_by_side(ours, self.numpy), theirs) < FP32_TOLERANCE

    @each_family
    def test_bf16_is_no_further_from_fp32_than_hugging_face_is(
        self, config, directory, hugging_face
    ):
        grid = [(1, 18, 26), (2, 10, 8)]
        patches = random_patches(config, grid, seed=2)
        exact_embeddings, exact = hugging_face.run(patches, grid)
        their_embeddings, theirs = HuggingFaceTower(directory, "bfloat16").run(patches, grid)
        tower = self.load(directory, "bfloat16")
        ours = map(self.numpy, tower.hidden_states(patches, grid))
        stages = [
            *zip(ours, theirs, exact, strict=True),
            (side_by_side(tower(patches, grid), self.numpy), their_embeddings, exact_embeddings),
        ]
        for our_state, their_state, exact_state in stages:
            our_error = relative_error(our_state, exact_state)
            their_error = relative_error(their_state, exact_state)
            assert our_error <= BF16_FACTOR * their_error

    @pytest.mark.parametrize("config", ["head_dim_80", "qwen2_vl", "qwen3_vl"], indirect=True)
    @pytest.mark.parametrize("case", ["product", "sum", "cancelling"])
    def test_fp16_with_biases_that_what_is_made_of_them_may_pass_fp16(self, config, tmp_path, case):
        """Numbers of the checkpoint and those that Hugging Face computes are all within it."""
        pytest.importorskip("transformers")
        tensors = random_tensors(config)
        first, second = (f"blocks.{block}.attn.proj.bias" for block in range(2))
        mlp, ending = "blocks.{}.mlp." + config.family.mlp_output, ".bias"
        up = f"blocks.0.mlp.{config.family.mlp_inputs[-1]}.weight"
        channel = {
            "product": {first: 2e4},
            "sum": {mlp.format(0) + ending: -4e4, second: 4e4, mlp.format(1) + ending: 4e4},
            "cancelling": {mlp.format(0) + ending: -2e4, second: 2e4, mlp.format(1) + ending: 3},
        }[case]
        for name, value in channel.items():
            tensors[name][3] = value
        if case == "product":
            tensors[up][:, 3] *= 40
        save_hugging_face_tower(tmp_path, config, **tensors)
        patches, grid = random_patches(config, GRIDS["clip"]), GRIDS["clip"]
        exact = HuggingFaceTower(tmp_path)(patches, grid)
        theirs = HuggingFaceTower(tmp_path, "float16")(patches, grid)
        ours = side_by_side(self.load(tmp_path, "float16")(patches, grid), self.numpy)
        assert relative_error(ours, exact) <= FP16_FACTOR * relative_error(theirs, exact)
