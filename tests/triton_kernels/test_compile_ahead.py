"""The kernels compiled for sm_80, sm_90 and sm_100 on any machine: what the binaries take."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests.hostile import examples
from tests.triton_kernels.compile_ahead import EVERY, TABLE, table_entry, table_key
from tests.triton_kernels.machine_code import (
    late_loads,
    loop_spills,
    narrow_stores,
    product_loops,
)
from tests.triton_kernels.wgmma_descriptors import high_word_sums

ROOT = Path(__file__).parents[2]

# Bytes of shared memory that one program may have. What is compiled for 8.0 has to fit 8.6, 8.9 and
# 12.0 too, which have the least.
SHARED_LIMIT = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# What a thread may spill where speed is not promised: 64 registers. On sm_90 nothing, in the dtypes
# that tensor cores multiply, up to a head_dim of 128; but where a launch bounds the registers, 32
# of them may wait in memory while a loop runs that does without them.
SPILL_LIMIT = 256
WAITING_LIMIT = 128
HOPPER_BACKWARD = ("hopper_backward_q_kernel", "hopper_backward_kv_kernel")
# Exempt from these: what nobody promises to be fast, and heads too wide for the registers.
SLOW = re.compile(
    r".*(float32|unaligned).*|stream_kernel( with log-sum-exps)?: .*, (168|256), .*"
    r"|window_kernel: .*, 256, .*|window_backward_kernel: .*, (192|256), .*"
)
# Whole images of heads with a tail. They come with launches that `compare tune` chose on an H200
# with Triton 3.6, where 96 to 112 bytes a thread wait in memory outside of loops. Triton 3.9 leaves
# up to 200 there, at 72 columns loads three registers again in the loop, and has the products wait
# for each other; compare/results/notes/triton-versions.md says what that costs.
SERIAL = {
    ("3.9.0", f"stream_kernel: sm_90, {variant}")
    for variant in (
        *("72, bfloat16, max 9216", "80, bfloat16, max 9216", "80, float16, max 9216"),
        *("80, bfloat16, max 9216, q", "80, bfloat16, max 9216, q, 8 key heads, norms of qk"),
        "80, bfloat16, max 9216, positions",
    )
}
# Known, and no more than the table says, by version and kernel. At 96 columns the warp-specialized
# kernel has 20 registers wait in memory outside of loops, by versions before 3.9. Of an odd number
# of pairs, which are loaded element by element, the windows' kernels have up to 76. Of 128 columns
# the sums of K's and V's gradients leave few registers: 18 wait, of which the loop loads one. Of
# heads of 512 the result's tile takes half of the registers and the logits a quarter, and no launch
# that spares them is faster: 602 us over 4 x 4,096 tokens on an H200 by Triton 3.6, 763 without.
WIDE = {
    ("3.9.0", "hopper_backward_kv_kernel: sm_90, 128, bfloat16, max 9216"): 1,
    ("3.6.0", "stream_kernel: sm_90, 512, bfloat16, max 9216"): 46,
    ("3.7.1", "stream_kernel: sm_90, 512, bfloat16, max 9216"): 42,
    ("3.9.0", "stream_kernel: sm_90, 512, bfloat16, max 9216"): 131,
}
_OF_WINDOWS = ("window_kernel", "window_backward_kernel")
KNOWN = {
    *SERIAL,
    *WIDE,
    *(
        (v, f"hopper_stream_kernel{lse}: sm_90, 96, bfloat16, max 9216")
        for v in ("3.6.0", "3.7.1")
        for lse in ("", " with log-sum-exps")
    ),
    *(
        (v, f"stream_backward_kv_kernel: sm_90, {columns}, bfloat16, max 9216")
        for v in ("3.6.0", "3.7.1")
        for columns in (96, 128)
    ),
    *(
        (v, f"window_backward_kernel: sm_90, {variant}")
        for v in ("3.6.0", "3.7.1")
        for variant in ("80, bfloat16, max 64, rotary 70", "120, bfloat16, max 64, rotary 90")
    ),
    ("3.7.1", "window_kernel: sm_90, 120, bfloat16, max 64, rotary 90"),
    ("3.7.1", "window_backward_kernel: sm_90, 128, bfloat16, max 128"),
    ("3.7.1", "stream_kernel: sm_100, 80, bfloat16, max 64, unaligned"),
    *(
        ("3.9.0", f"{kernel}: sm_90, {variant}")
        for kernel in _OF_WINDOWS
        for variant in (
            *("80, bfloat16, max 64, rotary 70", "120, bfloat16, max 64, rotary 90"),
            "128, bfloat16, max 128",
        )
    ),
}


def waiting_limit(record: dict) -> int:
    """Bytes of a thread's registers that may wait in memory outside of loops."""
    if record["kernel"].startswith("hopper_"):  # whose computing warps have 240 registers
        return 48
    return WAITING_LIMIT if record["maxnreg"] else 0


def is_known(record: dict) -> bool:
    return (triton.__version__, table_key(record)) in KNOWN


def is_serial(record: dict) -> bool:
    return (triton.__version__, table_key(record)) in SERIAL


def loop_limit(record: dict) -> int:
    """Loads and stores of spilled registers in loops that multiply."""
    if is_serial(record):
        return 3
    return WIDE.get((triton.__version__, table_key(record)), 0)


@pytest.fixture(scope="module")
def compiled():
    # torch.compile has a process, and those that it starts, take PyTorch's ptxas for Triton's own.
    changed = "TRITON_INTERPRET", "TRITON_PTXAS_PATH"
    environment = {k: v for k, v in os.environ.items() if k not in changed}
    every = ["--every"] if examples(1) > 1 else []
    result = subprocess.run(
        [sys.executable, "-m", "tests.triton_kernels.compile_ahead", *every],
        capture_output=True, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.long
def test_every_architecture_and_kernel_is_compiled(compiled):
    kernels = {"window_kernel", "window_backward_kernel", "stream_kernel", "rotate_kernel"}
    kernels |= {"stream_backward_q_kernel", "stream_backward_kv_kernel"}
    assert (90, "wide_kernel") in {(r["arch"], r["kernel"]) for r in compiled}
    assert {(r["arch"], r["kernel"]) for r in compiled} >= {
        (arch, kernel) for arch in SHARED_LIMIT for kernel in kernels
    }


def test_shared_memory_suffices(compiled):
    assert [r for r in compiled if r["shared"] > SHARED_LIMIT[r["arch"]]] == []
    arch = re.compile(r"sm_(\d+)")
    for entries in json.loads(TABLE.read_text()).values():
        for key, entry in entries.items():
            assert entry["shared"] <= SHARED_LIMIT[int(arch.search(key)[1])], key


def test_no_kernel_that_must_be_fast_spills(compiled):
    fast = [r for r in compiled if r["arch"] == 90 and not SLOW.fullmatch(table_key(r))]
    assert fast
    spilling = [r for r in fast if r["stack"] > waiting_limit(r)]
    assert [r for r in spilling if not is_known(r)] == []
    assert [r for r in fast if r["loop_spills"] > loop_limit(r)] == []


def test_products_do_not_wait_for_each_other(compiled):
    assert [r for r in compiled if r["serial_loops"] and not is_serial(r)] == []


def test_what_starts_before_the_launch_in_front_has_ended_waits_for_it(compiled):
    """And nothing else knows of that, but a rotation or the first of two, which let it start."""
    early = [record for record in compiled if record["starts_early"]]
    assert early
    assert all(record["waits"] for record in early)
    for record in compiled:
        lets = record["kernel"] == "rotate_kernel" or record["is_first"]
        assert record["waits"] == record["starts_early"]
        assert record["lets_next_start"] == (record["arch"] == 90 and lets)


def test_all_loads_of_a_tower_s_window_are_in_flight_at_once(compiled):
    """What the kernel's barrier and its launch's bound on registers are for."""
    towers = re.compile(r"sm_90, (64|72|80), bfloat16, max 64")
    windows = [
        r for r in compiled
        if r["kernel"] == "window_kernel" and towers.fullmatch(r["variant"])
    ]  # fmt: skip
    assert windows
    assert [r for r in windows if r["late_loads"]] == []


def test_the_warp_specialized_kernel_stores_16_bytes_at_once(compiled):
    # But for log-sum-exps, a number a row.
    hopper = [
        r for r in compiled
        if r["kernel"] == "hopper_stream_kernel" and not r["keeps_lse"]
    ]  # fmt: skip
    assert hopper
    assert [r for r in hopper if r["narrow_stores"]] == []


def test_every_kernel_that_multiplies_has_loops_to_look_at(compiled):
    """Else no spill would be found in them. fp32 is not multiplied by tensor cores."""
    sixteen_bits = [r for r in compiled if r["arch"] == 90 and "float32" not in r["variant"]]
    # The warp-specialized kernels' are two of each group of warps, or one of gradients.
    hopper = {"hopper_stream_kernel": 4, **dict.fromkeys(HOPPER_BACKWARD, 2)}
    for kernel, least in {"stream_kernel": 1, **hopper}.items():
        found = [r["product_loops"] for r in sixteen_bits if r["kernel"] == kernel]
        assert found
        assert min(found) >= least


def test_gradients_are_summed_from_registers(compiled):
    """What is made of logits never goes through shared memory."""
    queries, keys = (
        [r["first_operands"] for r in compiled if r["kernel"] == kernel]
        for kernel in HOPPER_BACKWARD
    )
    assert queries
    assert keys
    assert all(memory == 2 * registers > 0 for memory, registers in queries)
    assert all(memory == registers > 0 for memory, registers in keys)


def test_queries_are_multiplied_from_shared_memory(compiled):
    """Also those that the kernel has rotated: each pair of products is one of Q K^T, one of P V."""
    other = ("float32", "unaligned", "512")  # wide heads are multiplied chunk by chunk
    streams = [
        r for r in compiled
        if (r["arch"], r["kernel"]) == (90, "stream_kernel")
        and not any(e in r["variant"] for e in other)
    ]  # fmt: skip
    assert {r["variant"].rpartition(", ")[2] for r in streams} >= {"max 9216", "q", "qk"}
    assert all(
        memory >= registers > 0 for memory, registers in (r["first_operands"] for r in streams)
    )


def test_products_of_wide_heads_are_summed_chunk_by_chunk(compiled):
    """In fp32, where one sum through 2,048 columns has twice the error that is allowed."""
    chained = {
        table_key(r): r["chained_products"]
        for r in compiled
        if r["kernel"] in ("wide_kernel", "stream_kernel")
        and re.search(r", (512|520|2048), float32", r["variant"])
    }
    assert chained
    assert set(chained.values()) == {0}


# Not good, but known, and no more than the table says: on sm_80 windows of 128 rows, and of 96 and
# 120 columns, and gradients of heads with a tail; anywhere gradients of 192 columns in windows of
# 128; 256 columns; 208 in fp32, or 168 of which keys are rotated in the loop; on sm_80 norms, heads
# in chunks, and gradients of 128 in whole images, outside of their loops, and loads of single
# elements, anywhere of heads in chunks; on sm_90 these in fp32.
SPILLING = re.compile(
    r"window(_backward)?_kernel: sm_80, ((96|120), .*|.*max 128)"
    r"|window_backward_kernel: (sm_80, (72|80), .*max 64.*|.*, (192|256), .*)"
    r"|window_kernel: (sm_80, (256, .*|80, .*norms of qk)|.*, 256, float32, .*)"
    r"|stream_kernel( with log-sum-exps)?: .*, (168|208|256), .*"
    r"|stream_kernel: (sm_80, 5(12|20), .*|.*, 512, .*unaligned|sm_90, 512, float32, .*)"
    r"|stream_backward_(q|kv)_kernel: (sm_80, (128, .*max 9216|.*unaligned)|.*, (192|208|256), .*)"
)


def test_no_kernel_spills_much(compiled):
    """Neither of what is compiled here nor of what the table holds for any version."""
    stacks = {}
    for version, entries in json.loads(TABLE.read_text()).items():
        stacks |= {(version, key): entry["stack"] for key, entry in entries.items()}
    stacks |= {(triton.__version__, table_key(r)): r["stack"] for r in compiled}
    spilling = {place for place, stack in stacks.items() if stack > SPILL_LIMIT} - KNOWN
    assert {place for place in spilling if not SPILLING.fullmatch(place[1])} == set()


def test_no_kernel_is_left_with_few_registers(compiled):
    """As ptxas leaves one that would spill with 255, unless a launch says how many it may have."""
    few = [r for r in compiled if r["registers"] <= 32 and r["stack"]]
    table = json.loads(TABLE.read_text()).values()
    few += [e for entries in table for e in entries.values() if e["registers"] <= 32 and e["stack"]]
    assert few == []


def test_no_kernel_is_empty(compiled):
    """As Triton 3.6 leaves it on sm_100, without a word, of three products with two tiles of V."""
    empty = [table_key(r) for r in compiled if r["registers"] < 16]
    for version, entries in json.loads(TABLE.read_text()).items():
        empty += [(version, key) for key, e in entries.items() if e["registers"] < 16]
    assert empty == []


def test_registers_shared_memory_and_spills_are_those_of_the_table(compiled):
    table = json.loads(TABLE.read_text())
    how = "python -m tests.triton_kernels.compile_ahead --write"
    if triton.__version__ not in table:
        pytest.skip(f"no table for Triton {triton.__version__}, whose ptxas decides: {how}")
    known = table[triton.__version__]
    changed = [
        f"{table_key(record)}: {table_entry(record)}, the table has {known.get(table_key(record))}"
        for record in compiled
        if table_entry(record) != known.get(table_key(record))
    ]
    assert not changed, "\n".join([*changed, f"If that is meant: {how}"])


def test_the_table_holds_every_variant():
    for entries in json.loads(TABLE.read_text()).values():
        variants = {key.partition(": ")[2] for key in entries}
        assert variants == set(map(str, EVERY))


@pytest.mark.parametrize(
    ("body", "spills"),
    [
        (("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "LDL R3, [R1]", "STL [R1+0x4], R3"), 2),
        (("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "LDG.E R3, [R4.64]"), 0),
        (("FADD R3, R3, R4", "LDL R3, [R1]"), 0),  # no product
    ],
)
def test_spills_are_found_where_they_cost(body, spills):
    start = sass("STL [R1], R3")
    loop = "\n".join([".L_x_1:", sass(*body, "@P0 BRA `(.L_x_1)")])
    assert loop_spills("\n".join([start, loop, sass("LDL R3, [R1]", "BRA `(.L_x_2)")])) == spills


def test_a_loop_that_waits_for_barriers_is_one():
    """Warps wait by a loop in it, or by one that stands behind the kernel's end."""
    product, spill = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "LDL R3, [R1]"
    again = sass("@!P1 BRA `(.L_x_2)")
    within = [".L_x_2:", again, sass(product, spill)]
    behind = [again, ".L_x_3:", sass(product, spill)]
    end = [sass("EXIT"), ".L_x_2:", again, sass("BRA `(.L_x_3)")]
    for body, rest in ((within, []), (behind, end)):
        outer = [".L_x_0:", sass(spill), ".L_x_1:", *body, sass("@P0 BRA `(.L_x_1)")]
        code = "\n".join([*outer, sass("@P2 BRA `(.L_x_0)"), *rest])
        assert [loop.count(spill) for loop in product_loops(code)] == [1]


def test_late_loads_are_found():
    load, multiply = "LDG.E.128 R4, [R2.64]", "FMUL R8, R4, R5"
    assert late_loads(sass(load, load, multiply)) == 0
    assert late_loads(sass(load, multiply, "@P0 " + load, load)) == 2


def test_narrow_stores_are_found():
    stores = "STG.E.128 [R2.64], R4", "@P0 STG.E [R2.64], R4", "STG.E.U16 [R2.64+0x2], R4"
    assert narrow_stores(sass(*stores, "STS.64 [R2], R4")) == 2


def test_no_wgmma_descriptor_is_broken(compiled):
    assert [r for r in compiled if r["broken_descriptors"]] == []


def sass(*instructions):
    return "\n".join(
        f"        /*{16 * i:04x}*/                   {x} ;" for i, x in enumerate(instructions)
    )


@pytest.mark.parametrize(
    ("writer", "high", "is_broken"),
    [
        ("UMOV UR4, URZ", "UR4", False),
        ("@!UP0 UMOV UR4, URZ", "UR4", False),
        ("NOP", "URZ", False),
        ("UMOV UR4, UR9", "UR4", True),
        ("ULOP3.LUT UR4, UR9, 0xf, URZ, 0xc0, !UPT", "UR4", True),
        ("NOP", "UR4", True),  # nothing wrote it
        ("UIADD3.64 UR10, UR58, 0x2, URZ", "UR11", True),  # the upper of a pair
    ],
)
@pytest.mark.parametrize("layout", ["0x40000040", "-0x7fffffe0", "-0x3ffffff0"])
def test_broken_descriptors_are_found(writer, high, is_broken, layout):
    add = f"UIADD3.X UR13, {high}, {layout}, URZ, UP0, !UPT"
    sums, broken = high_word_sums(
        sass(writer, "UIADD3 UR12, UP0, UR8, 0x2, URZ", add, "UMOV UR4, 0x1")
    )
    assert sums == [add]
    assert len(broken) == is_broken


def test_other_sums_are_no_descriptors():
    assert high_word_sums(sass("UIADD3.X UR7, UR19, URZ, URZ, UP1, !UPT", "EXIT")) == ([], [])
