import pytest

from flax_models import VisionConfig
from flax_models.memory import check_memory, pass_bytes

CONFIG = VisionConfig.qwen2_5_vl_7b()
GIB = 1 << 30


def test_a_pass_holds_at_least_the_mlps_three_arrays():
    tokens = 9216
    assert pass_bytes(CONFIG, tokens, 2) > tokens * 3 * 3456 * 2
    assert pass_bytes(CONFIG, 2 * tokens, 2) == 2 * pass_bytes(CONFIG, tokens, 2)
    assert pass_bytes(CONFIG, tokens, 4) == 2 * pass_bytes(CONFIG, tokens, 2)


def test_a_million_tokens_fit_a_large_gpu_or_are_refused():
    check_memory(CONFIG, 1 << 20, 2, lambda: 130 * GIB)
    with pytest.raises(MemoryError, match=r"1,048,576 tokens needs about 25\.2 GiB .* 20\.0 GiB"):
        check_memory(CONFIG, 1 << 20, 2, lambda: 20 * GIB)


def test_nothing_is_refused_where_nothing_is_known():
    check_memory(CONFIG, 1 << 26, 4, lambda: None)


def test_small_calls_do_not_ask():
    check_memory(CONFIG, 20_480, 2, lambda: pytest.fail("asked"))
