import pytest

from flax_models import VisionConfig
from flax_models.common.memory import check_memory, pass_bytes

CONFIG = VisionConfig.qwen2_5_vl_7b()
GIB = 1 << 30


def test_a_pass_holds_at_least_the_mlps_three_arrays():
    tokens = 9216
    in_bf16 = pass_bytes(CONFIG, tokens, "bfloat16")
    assert in_bf16 > tokens * 3 * 3456 * 2
    assert pass_bytes(CONFIG, 2 * tokens, "bfloat16") == 2 * in_bf16
    assert pass_bytes(CONFIG, tokens, "float32") == 2 * in_bf16
    # Gate and up of an un-normed stream, which fp16 could not hold.
    assert pass_bytes(CONFIG, tokens, "float16") == in_bf16 + tokens * 2 * 3456 * 2
    other = VisionConfig.qwen2_vl_7b()
    assert pass_bytes(other, tokens, "float16") == pass_bytes(other, tokens, "bfloat16")


def test_a_million_tokens_fit_a_large_gpu_or_are_refused():
    check_memory(CONFIG, 1 << 20, "bfloat16", lambda: 130 * GIB)
    with pytest.raises(MemoryError, match=r"1,048,576 tokens needs about 25\.2 GiB .* 20\.0 GiB"):
        check_memory(CONFIG, 1 << 20, "bfloat16", lambda: 20 * GIB)


def test_nothing_is_refused_where_nothing_is_known():
    check_memory(CONFIG, 1 << 26, "float32", lambda: None)


def test_small_calls_do_not_ask():
    check_memory(CONFIG, 20_480, "bfloat16", lambda: pytest.fail("asked"))
