"""Rotated and added positions over heads of any width, with stand-ins for clocks and kernels."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("jax")

from compare.agreement.expected import Expected
from compare.agreement.kernels import run
from compare.agreement.oracle import oracle, unfused
from compare.bench import embeddings
from compare.bench.ceilings import Ceilings
from compare.bench.embeddings import Way, bench_embeddings, told
from compare.common.errors import UnavailableError
from compare.implementations import kernels
from compare.implementations.kernels import INSIDE, TABLES, KernelImplementation
from compare.implementations.peers_jax import jax_peers
from compare.implementations.peers_sdpa import sdpa_peers
from compare.workloads.embeddings import EMBEDDING_WORKLOADS, NAMED_SHAPES, Shape, parsed, workload
from tests.compare.clocks import stand_in_clocks

CEILINGS = Ceilings(4e9, 4e9, 8e14)
SMALL = Shape(2, 16, 64)


def test_names_tell_embedding_precision_and_shape():
    assert str(SMALL) == "2x16x64"
    for name, made in EMBEDDING_WORKLOADS.items():
        embedding, precision, shape = parsed(name)
        assert (embedding, {"fp32": "float32", "bf16": "bfloat16"}[precision]) == (
            made.embedding,
            made.dtype,
        )
        assert shape == (
            len(made.grid_thw),
            made.grid_thw[0][1] * made.grid_thw[0][2],
            made.head_dim,
        )
    assert parsed("windows-448") is parsed("rope_fp32-16") is None
    shapes = {parsed(name)[2] for name in EMBEDDING_WORKLOADS}
    assert shapes >= set(NAMED_SHAPES)
    assert {(shape.length, shape.width) for shape in shapes} >= {
        (length, width) for width in (64, 80, 128, 512, 2048, 4096) for length in (16, 64, 1024)
    } | {(length, width) for width in (8192, 16384) for length in (16, 64)}
    assert len(EMBEDDING_WORKLOADS) == 4 * len(shapes)


def test_a_sinusoidal_table_is_of_places_within_a_segment():
    made = workload("sinusoidal", "fp32", SMALL)
    assert made.positions.tolist() == 2 * list(range(16))
    inputs = made.inputs()
    for token, place, pair in ((3, 3, 0), (21, 5, 7), (31, 15, 31)):
        angle = place / 10000 ** (2 * pair / 64)
        assert inputs.sin[token, pair] == np.float32(math.sin(angle))
        assert inputs.cos[token, pair] == np.float32(math.cos(angle))


@pytest.mark.parametrize("embedding", ["rope", "sinusoidal"])
def test_oracle_and_peers_compute_the_operation(monkeypatch, embedding):
    """PyTorch's by those of SDPA's backends that there are; a table read wrongly is seen."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    made = workload(embedding, "fp32", SMALL)
    expected = replace(Expected.of(made), unfused_error=math.inf)  # as peers are measured
    peers = [*sdpa_peers(embedding), *jax_peers(embedding)]
    assert len({peer.name for peer in peers}) == len(peers)
    judged = {}
    for peer in peers:
        if peer.name.endswith((" + SDPA", "math SDPA", "XLA attention")):
            judged[peer.name] = expected.judge([run(peer, made, expected.inputs)])
    assert len(judged) == 3
    assert all(verdict.passed for verdict in judged.values()), judged
    swapped = replace(expected.inputs, cos=expected.inputs.sin, sin=expected.inputs.cos)
    assert not expected.judge([oracle(swapped)]).passed


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("twin", [kernels.triton, kernels.pallas])
def test_ours_gets_tables_or_positions(monkeypatch, twin, tables):
    """By the packages' references, whose kernels have tests of their own."""
    attention, taken = kernels.our_attention, []

    def reference(*arguments, **options):
        attend = attention(*arguments, **options)
        assert attend.keywords["fuse"] == "q"

        def call(qkv, cos, sin, cu_seqlens, **positions):
            taken.append((cos is None, sin is None, list(positions)))
            keywords = positions | {"implementation": "reference"}
            return attend(qkv, cos, sin, cu_seqlens, **keywords)

        return call

    monkeypatch.setattr(kernels, "our_attention", reference)
    made = workload("sinusoidal", "fp32", SMALL)
    expected = Expected.of(made)
    assert expected.judge([run(twin("q", tables=tables), made, expected.inputs)]).passed
    assert taken == [(False, False, []) if tables else (True, True, ["positions"])]


def test_added_positions_are_those_of_the_formula():
    made = workload("sinusoidal", "fp32", Shape(1, 16, 64))
    inputs = made.inputs()
    q, k, v = (x.astype(np.float64)[:, 0] for x in inputs.qkv.swapaxes(0, 1))
    place, column = np.arange(16)[:, None], np.arange(64)
    angle = place / 10000 ** (2 * (column // 2) / 64)
    added = np.where(column % 2 == 0, np.sin(angle), np.cos(angle))
    p = np.exp((q + added) @ (k + added).T / 8)
    expected = p / p.sum(1, keepdims=True) @ v
    assert np.abs(oracle(inputs)[:, 0].cpu().numpy() - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("name", "shape", "precision", "reason"),
    [
        ("FlexAttention", Shape(1, 16, 8192), "fp32", "not tried above 256 columns"),
        ("ffpa-attn", Shape(1, 16, 2048), "bf16", "to SDPA"),
        ("ffpa-attn", Shape(1, 16, 512), "fp32", "takes bf16"),
        ("ffpa-attn CuTeDSL", Shape(1, 16, 640), "bf16", "other than 512 columns to SDPA"),
    ],
)
def test_what_would_not_be_itself_says_so(name, shape, precision, reason):
    [peer] = [peer for peer in sdpa_peers("rope") if peer.name == f"torch.compile rope + {name}"]
    with pytest.raises(UnavailableError, match=reason):
        peer.prepare(workload("rope", precision, shape))


def test_every_peer_is_tried_on_few_and_elsewhere_those_that_could_win():
    named = EMBEDDING_WORKLOADS["sinusoidal_fp32-1x64x512"]
    names = [peer.name for peer in [*sdpa_peers("sinusoidal"), *jax_peers("sinusoidal")]]
    assert [way.implementation.name for way in embeddings.peers(named)] == names
    every = [made.name for made in EMBEDDING_WORKLOADS.values() if made.peers is None]
    assert len(every) == 4 * 3
    for made in EMBEDDING_WORKLOADS.values():
        known = {peer.name for peer in [*sdpa_peers(made.embedding), *jax_peers(made.embedding)]}
        assert set(made.peers or ()) <= known
    ways = [(way.fuse, way.angles) for way in embeddings.our_ways(named)]
    each = ["qk", "q", "none", "auto"]
    assert ways == 2 * [(fuse, angles) for angles in (TABLES, INSIDE) for fuse in each]
    rotated = embeddings.our_ways(EMBEDDING_WORKLOADS["rope_bf16-1x64x512"])
    assert [(way.fuse, way.angles) for way in rotated] == 2 * [(fuse, TABLES) for fuse in each]


def way(us, fuse=None, angles=TABLES, ours=True, off=0.0, relative=0.0):
    """A stand-in that takes a made-up time, and is off in one element or in all of them."""

    def prepare(made):
        out = unfused(made.inputs()) * (1 + relative)
        out[0, 0, 0] += off

        def call(*_):
            return out.clone()

        call.us = us
        return call

    name = "triton" if ours else "peer"
    return Way(KernelImplementation(name, "torch", prepare, ours), fuse, angles)


def test_every_way_is_timed_beside_its_error(monkeypatch, capsys):
    stand_in_clocks(monkeypatch)
    ways = [way(4, "qk"), way(6, "q"), way(3, "auto", INSIDE), way(8, ours=False)]
    made = [workload("sinusoidal", precision, SMALL) for precision in ("fp32", "bf16")]
    measured = list(bench_embeddings(made, CEILINGS, lambda _: ways))
    assert [records[0].workload for records in measured] == [w.name for w in made]
    for records, of in zip(measured, made, strict=True):
        assert [record.median_us for record in records] == [4, 6, 3, 8]
        assert [told(record) for record in records] == [
            *("triton qk", "triton q", "triton auto, angles inside", "peer"),
        ]
        # Only "auto" is profiled, to be set against its twin's.
        assert [record.profiler_us for record in records] == [None, None, 9, None]
        assert records[0].floor_us == pytest.approx(1e6 * of.bytes_moved / 4e9)
        tables = of.tokens * of.head_dim * 4
        spared = records[0].floor_us - records[2].floor_us
        assert spared == pytest.approx(1e6 * (tables - 4 * of.tokens) / 4e9)
    assert measured[0][0].details["max_abs_error"] < 5e-5
    assert "max_abs_error" not in measured[1][0].details
    assert "triton auto, angles inside" in capsys.readouterr().out


def test_large_inputs_have_fewer_sets(monkeypatch):
    stand_in_clocks(monkeypatch)
    sets = []
    monkeypatch.setattr(embeddings, "measure", lambda _, __, effort: sets.append(effort.torch_sets))
    made = workload("rope", "bf16", SMALL)
    inputs = made.inputs()
    for large in (inputs.qkv.nbytes - 1, inputs.qkv.nbytes):
        monkeypatch.setattr(embeddings, "_LARGE", large)
        list(embeddings._measure([way(4, "qk")], made, inputs))
    assert sets == [8, 20]


def test_errors_are_held_to_both_rules_and_a_peers_fp32_to_one(monkeypatch):
    stand_in_clocks(monkeypatch)
    ways = [
        *(way(4, "qk", off=1e-4), way(4, "qk", off=1e-6)),
        *(way(4, ours=False, off=1e-4), way(4, ours=False, relative=5e-6)),
        *(way(4, "qk", relative=5e-6), way(4, "qk", off=math.nan)),
    ]
    [records] = bench_embeddings([workload("rope", "fp32", SMALL)], CEILINGS, lambda _: ways)
    assert [record.passed for record in records] == [False, True, False, True, False, False]
    assert [record.median_us for record in records] == [None, 4, None, 4, None, None]


def test_floor_of_fp32_is_three_products_in_bf16(monkeypatch):
    stand_in_clocks(monkeypatch)
    slow = Ceilings(4e18, 4e18, 1e9)
    for precision, products in (("fp32", 3), ("bf16", 1)):
        made = workload("rope", precision, SMALL)
        [[record]] = bench_embeddings([made], slow, lambda _: [way(4, "qk")])
        assert record.floor_us == pytest.approx(1e6 * products * made.matrix_flops / 1e9)


def test_where_nothing_can_be_judged_ours_fails_and_peers_have_the_reason(monkeypatch):
    def broken(*_):
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(embeddings.Expected, "of", broken)
    ways = [way(4, "qk"), way(8, ours=False)]
    [records] = bench_embeddings([workload("rope", "bf16", SMALL)], CEILINGS, lambda _: ways)
    assert [record.passed for record in records] == [False, None]
    assert {record.note for record in records} == {"RuntimeError: the GPU is gone"}
