"""Hostile cu_seqlens for property-based tests, and how many of them are drawn."""

import os

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

# Times as many examples as in every run: EXAMPLES=50 python -m pytest tests -k hostile
_FACTOR = int(os.environ.get("EXAMPLES", "1"))

TOKENS = 30
KINDS = {
    "legal": (0, 9, 9, 20, 27),
    "negative": (-5, 4, -9, 30, 30),
    "beyond the end": (0, 40, 2**31 - 1, 50, 60),
    "decreasing": (30, 20, 10, 5, 0),
    "back and forth": (0, 30, 3, 29, 1),
    "the whole range": (-(2**31), 2**31 - 1, -(2**31), 2**31 - 1, 0),  # lengths pass 32 bits
    "and the other way": (2**31 - 1, -(2**31), 0, -(2**31), -(2**31)),
    "all beyond the end": (31, 32, 33, 34, 35),
    "all negative": (-4, -3, -2, -1, -1),
}


def examples(usual: int) -> int:
    """For `settings(max_examples=...)`: the usual number times the environment's EXAMPLES."""
    return usual * _FACTOR


def refusable(cu_seqlens, max_seqlen):
    """Mask of the rows, TOKENS of them, of segments longer than max_seqlen: they may be NaN."""
    row = np.arange(TOKENS)
    starts, ends = (np.clip(x, 0, TOKENS)[:, None] for x in (cu_seqlens[:-1], cu_seqlens[1:]))
    return ((starts <= row) & (row < ends) & (ends - starts > max_seqlen)).any(axis=0)


def hostile_cu_seqlens(usual: int, **others):
    """Run a test with `cu_seqlens` of every kind of KINDS and of any content, for TOKENS tokens.

    Args:
        usual: examples that are drawn beside the kinds.
        others: values of the test's other arguments, drawn too; the kinds take them in turn.
    """
    values = st.integers(-3, TOKENS + 10) | st.integers(-(2**31), 2**31 - 1)
    strategy = st.lists(values, min_size=5, max_size=5)
    strategy |= st.lists(st.integers(0, TOKENS), min_size=5, max_size=5).map(sorted)

    def decorate(test):
        drawn = {name: st.sampled_from(options) for name, options in others.items()}
        test = given(cu_seqlens=strategy, **drawn)(test)
        for i, kind in enumerate(KINDS.values()):
            chosen = {name: options[i % len(options)] for name, options in others.items()}
            test = example(cu_seqlens=list(kind), **chosen)(test)
        return settings(max_examples=examples(usual))(test)

    return decorate
