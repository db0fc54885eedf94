"""Both packages' tables of launches: what they hold, and what is found in them."""

import dataclasses
import importlib
import itertools
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"triton_kernels": "torch", "pallas_kernels": "jax"}
HEAD_DIMS = range(8, 257, 8)


@pytest.fixture(params=PACKAGES)
def package(request):
    pytest.importorskip(PACKAGES[request.param])
    return request.param


@pytest.fixture
def module(package):
    return importlib.import_module(f"{package}.launching.table")


@pytest.fixture
def launch(package):
    return importlib.import_module(f"{package}.launching.choose")


@pytest.fixture
def table(module, launch):
    return module.Table.read(launch.TABLE_FILE)


def made_up(module):
    """A table of two GPUs of one generation, of which the second has rows for windows alone."""
    row = {"kernel": "stream", "block_k": 16, "num_warps": 4, "num_stages": 1}
    window = {"kernel": "window", "max_length": 64, "block": 64, "block_k": 64, "num_stages": 1}
    return module.Table.from_text(
        json.dumps(
            {
                "First": {
                    "compute_capability": "9.0",
                    "launches": [
                        row | {"max_head_dim": 80, "max_length": 256, "max_rows": 999, "block": 8},
                        row | {"max_head_dim": 80, "max_length": 256, "block": 16},
                        row | {"max_head_dim": 80, "block": 32},
                        row | {"operands": "half", "block": 64},
                    ],
                },
                "Second": {"compute_capability": "9.0", "launches": [window | {"num_warps": 2}]},
                "default": {
                    "compute_capability": None,
                    "launches": [row | {"block": 128}, window | {"num_warps": 8}],
                },
            }
        )
    )


def block(
    module, table, name, capability="9.0", operands="half", head_dim=80, length=256, rows=1000
):
    gpu = name and module.Gpu(name, capability)
    return table.find(gpu, module.Shape("stream", operands, head_dim, length, rows)).block


def test_the_first_row_whose_conditions_hold(module):
    table = made_up(module)
    assert block(module, table, "First") == 16
    assert block(module, table, "First", length=129) == 16
    assert block(module, table, "First", length=257) == 32
    assert block(module, table, "First", rows=999) == 8
    assert block(module, table, "First", head_dim=88) == 64
    assert block(module, table, "First", head_dim=88, operands="single") == 128


def test_unknown_devices(module):
    table = made_up(module)
    assert block(module, table, "Third", "9.0") == 16  # the first of its generation
    assert block(module, table, "Third", "10.0") == 128
    assert block(module, table, None) == 128


def test_what_a_device_lacks_is_the_defaults(module):
    table = made_up(module)
    assert block(module, table, "Second") == 128
    window = module.Shape("window", "half", 80, 64, 1000)
    assert table.find(module.Gpu("Second", "9.0"), window).num_warps == 2
    assert table.find(module.Gpu("First", "9.0"), window).num_warps == 8
    with pytest.raises(ValueError, match="has none for Shape"):
        table.find(None, module.Shape("rotate", "half", 80, 1, 1000))


def test_a_longest_segment_may_be_any_number(module):
    rows = [ROW | {"max_length": 100}, ROW | {"block": 32}]
    device = {"compute_capability": None, "launches": rows}
    table = module.Table.from_text(json.dumps({"default": device}))
    assert block(module, table, None, length=100) == 16
    assert block(module, table, None, length=101) == 32


def test_rows_of_a_device_are_put_in_their_places(module, table):
    launch = module.Launch(16, 16, 1, 1)
    gpu = module.Gpu("Imaginary GPU", "9.9")
    rows = [
        module.Row("stream", launch, "half", max_head_dim=96),
        module.Row("stream", launch._replace(block=32), "half", max_head_dim=96, max_length=256),
        module.Row("stream", launch._replace(block=64), "half", max_head_dim=64),
        module.Row("stream", launch._replace(block=128), "half", max_head_dim=64, max_length=256),
        module.Row("stream", launch._replace(block=8), "half", max_head_dim=64, max_rows=999),
    ]
    changed = table.with_rows(gpu, rows)
    assert list(changed.devices) == [*list(table.devices)[:-1], "Imaginary GPU", "default"]
    assert block(module, changed, *gpu, head_dim=64, length=300) == 64
    assert block(module, changed, *gpu, head_dim=64, length=256) == 128
    assert block(module, changed, *gpu, head_dim=64, length=256, rows=999) == 8  # before the length
    assert block(module, changed, *gpu, head_dim=72) == 32
    assert block(module, changed, *gpu, head_dim=72, length=300) == 16
    assert block(module, table, *gpu) == block(module, table, None)  # the first table is as it was
    again = changed.with_rows(gpu, rows[:1])
    assert again.devices["Imaginary GPU"].rows == tuple(rows[:1])


ROW = {"kernel": "stream", "block": 16, "block_k": 16, "num_warps": 4, "num_stages": 1}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kernel": "wave"}, "kernel must be one of .* got 'wave'"),
        ({"operands": "double"}, "operands must be one of .* got 'double'"),
        ({"block": 48}, "block must be a power of two, got 48"),
        ({"num_warps": 0}, "num_warps must be a positive integer, got 0"),
        ({"num_stages": True}, "num_stages must be a positive integer, got True"),
        ({"max_head_dim": "80"}, "max_head_dim must be a positive integer, got '80'"),
        ({"max_rows": 0}, "max_rows must be a positive integer, got 0"),
        ({"warps": 4}, "expected only .* got warps"),
        ({"kernel": "window"}, "max_length must be given and at most block"),
        ({"kernel": "window", "max_length": 32}, "max_length must be given and at most block"),
        ({"kernel": "window_backward"}, "max_length must be given and at most block"),
    ],
)
def test_a_malformed_row_is_told_with_its_place(module, tmp_path, change, sentence):
    path = tmp_path / "launches.json"
    device = {"compute_capability": None, "launches": [ROW, ROW | change]}
    path.write_text(json.dumps({"default": device}))
    with pytest.raises(ValueError, match=rf"is no table.*default, row 1: .*{sentence}"):
        module.Table.read(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "Expecting"),
        ("[]", "expected an object of devices, got list"),
        ("{}", "needs a device 'default'"),
        ('{"default": []}', "default: expected an object of compute_capability and launches"),
        ('{"default": {"compute_capability": null, "launches": 3}}', "launches to be a list"),
        ('{"default": {"compute_capability": null, "launches": [1]}}', "row 0: expected an object"),
        (
            '{"default": {"compute_capability": null, "launches": [{"kernel": "stream"}]}}',
            "row 0: block, block_k, num_stages, num_warps missing",
        ),
    ],
)
def test_what_is_no_table_is_refused(module, tmp_path, text, sentence):
    (tmp_path / "launches.json").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        module.Table.read(tmp_path / "launches.json")


def test_the_file_is_as_it_would_be_written(table, launch):
    assert table.to_text() == launch.TABLE_FILE.read_text()


def test_every_call_finds_a_launch(module, table, launch):
    gpus = [None, *(module.Gpu(n, d.compute_capability or "") for n, d in table.devices.items())]
    for gpu, operands, head_dim in itertools.product(gpus, module.OPERANDS, HEAD_DIMS):
        for length in (1, 16, 17, 64, 65, 128):
            for kernel in ("window", "window_backward"):
                found = table.find(gpu, module.Shape(kernel, operands, head_dim, length, 1))
                assert found.block >= length
        backward = [(f"stream_backward_{name}", 2**30) for name in ("q", "kv")]
        for kernel, length in (("rotate", 1), ("stream", 1), ("stream", 2**30), *backward):
            found = table.find(gpu, module.Shape(kernel, operands, head_dim, length, 1))
            assert found.columns is None


def test_every_call_of_wide_heads_finds_a_launch(module, table, launch):
    """In chunks whose columns divide those that a head is given a place of."""
    gpus = [None, *(module.Gpu(n, d.compute_capability or "") for n, d in table.devices.items())]
    for gpu, operands, head_dim in itertools.product(gpus, module.OPERANDS, (264, 512, 16384)):
        assert launch.is_wide(head_dim)
        for length in (1, 16, 17, launch.WIDE_LIMIT):
            found = table.find(gpu, module.Shape("wide", operands, head_dim, length, 1))
            assert found.block in (16, 32, 64)
            assert found.block // 2 < max(length, launch.MIN_COLUMNS) <= found.block
            assert launch.WIDEST_CHUNK % found.columns == 0
        for kernel, length in (("rotate", 1), ("stream", 2**30), ("rotating_stream", 65)):
            found = table.find(gpu, module.Shape(kernel, operands, head_dim, length, 1))
            assert launch.WIDEST_CHUNK % found.columns == 0
            assert kernel == "rotate" or found.out_columns >= launch.MIN_COLUMNS


def test_programs_that_share_a_wide_head(launch):
    """As many as give each multiprocessor two; where segments and heads do, one."""
    splits = launch.column_splits
    assert [splits(n, 512, 64, 64) for n in (1, 64, 128, 133)] == [8, 4, 2, 1]
    assert [splits(n, 16384, 64, 64) for n in (0, 1, 4, 8, 16, 64)] == [64, 64, 32, 16, 16, 4]
    assert splits(1, 16384, 64, 16) == 128
    shares = launch.out_shares
    assert [shares(n, 512, 64, 64) for n in (0, 1, 8, 64, 128)] == [
        *((8, 16), (8, 16), (8, 16), (2, 32), (1, 32)),
    ]
    assert shares(1, 16384, 128, 16) == (128, 16)


def test_waves_that_are_just_full_are(launch, monkeypatch):
    monkeypatch.setattr(launch, "_MULTIPROCESSORS", 4)
    blocks = [3 * 128, 3 * 128 + 1, 7 * 128, 4 * 128 + 1]
    assert [launch._fills_waves(0.75, tokens, 1) for tokens in blocks] == [True, True, True, False]
    assert not launch._fills_waves(0.75, 2 * 128, 1)


def test_rows_are_for_different_shapes(table):
    for device in table.devices.values():
        conditions = {dataclasses.replace(row, launch=None) for row in device.rows}
        assert len(conditions) == len(device.rows)


def test_unaligned_tiles_have_32_rows(module, table):
    """Larger ones are miscompiled: see find_launch."""
    if module.__name__.startswith("pallas"):
        pytest.skip("JAX's arrays are aligned")
    for name, device in table.devices.items():
        gpu = module.Gpu(name, device.compute_capability or "")
        for head_dim in HEAD_DIMS:
            assert block(module, table, *gpu, operands="unaligned", head_dim=head_dim) == 32
        assert block(module, table, *gpu, operands="unaligned", head_dim=512) == 32


def finder(launch, package):
    """find_launch of a package for fp16, from the table in use at each call."""
    if package == "pallas_kernels":
        return lambda kernel, *shape: launch.find_launch(kernel, "float16", *shape)
    dtype = importlib.import_module("torch").float16
    return lambda kernel, *shape: launch.find_launch(
        kernel, dtype, *shape, launch.launch_source(None)
    )


def test_another_table_for_a_while(module, launch, package, monkeypatch):
    monkeypatch.setattr(launch, "gpu", lambda *_: None)
    find = finder(launch, package)
    before = find("stream", 80, 300, 1)
    with launch.launching_by(made_up(module)):
        assert find("stream", 80, 300, 1).block == 128
        assert find("stream", 80, 300, 1) != before
    assert find("stream", 80, 300, 1) == before


def test_a_row_for_few_rows(module, launch, package):
    row = {"kernel": "stream", "block_k": 16, "num_warps": 4, "num_stages": 1}
    launches = [row | {"max_rows": 6, "block": 16}, row | {"block": 32}]
    default = {"compute_capability": None, "launches": launches}
    with launch.launching_by(module.Table.from_text(json.dumps({"default": default}))):
        for rows, expected in ((5, 16), (6, 16), (7, 32)):
            assert finder(launch, package)("stream", 80, 300, rows).block == expected


def test_the_table_is_read_by_the_same_code_in_both_packages():
    texts = {(ROOT / package / "launching" / "table.py").read_text() for package in PACKAGES}
    assert len(texts) == 1


def test_the_twins_refer_to_the_same_keys():
    """A row's softmax refers to its segment's first key tile: with tiles of 32 and of 64 rows, two
    bf16 results are further from each other than the twins may be.
    """
    key_tiles = []
    for package, framework in PACKAGES.items():
        pytest.importorskip(framework)
        module = importlib.import_module(f"{package}.launching.table")
        table = module.Table.read(ROOT / package / "launching" / "launches.json")
        gpus = [module.Gpu(n, d.compute_capability or "") for n, d in table.devices.items()]
        shapes = itertools.product(
            gpus,
            ("stream", "rotating_stream"),
            range(8, 129, 8),  # wider heads have no reference
            (513, 577, 1025, 2**30),
            (1, 1 << 14, 36_864, 1 << 30),
        )
        key_tiles.append(
            {
                (gpu, kernel, *shape): table.find(gpu, module.Shape(kernel, "half", *shape)).block_k
                for gpu, kernel, *shape in shapes
            }
        )
    first, second = key_tiles
    assert first == second
