"""Where the unfused computation rounds, and where it does not, by numbers worked out by hand.

The two-times rule measures kernels by it: were it to round once too often, or too little, nobody
would see the rule loosen. In each case a token attends to A and B and hardly to itself, and what is
expected would be another number if a step rounded differently.
"""

import numpy as np
import pytest

from tests.kernel_cases import DTYPES, Case

# bfloat16 has 8 bits: just above 1 its values are 2 ** -7 apart, just below 1 2 ** -8.
BELOW_ROUNDING = 2.0**-9
AWAY = 2.0**100


def case(q: dict, a: dict, b: dict, v: tuple[float, float], turned: int | None = None) -> Case:
    """Columns of the first token's q, of A's and B's k, and A's and B's v.

    turned: the token whose q and k are multiplied by 1 + 2 ** -9 on rotation, in column 0.
    """
    qkv = np.zeros((3, 3, 1, 8), np.float32)
    qkv[0, :2, 0, 7] = 1, -AWAY
    for place, columns in (((0, 0), q), ((1, 1), a), ((2, 1), b)):
        for column, value in columns.items():
            qkv[(*place, 0, column)] = value
    qkv[1:, 2, 0, 0] = v
    cos = np.ones((3, 1), np.float32)
    if turned is not None:
        cos[turned] += BELOW_ROUNDING
    bounds = np.array([0, 3], np.int32)
    return Case(qkv.astype(DTYPES["bfloat16"]), cos, np.zeros_like(cos), bounds)


ONE = {2: 1.0}
# name: the case, the logits' factor, and the first token's first column.
CASES = {
    # A's logit is B's, 64, and not 64 (1 + 2 ** -9).
    "rotated q is cast": (case({0: 1, **ONE}, {0: 1}, ONE, (1, 0), turned=0), 64, 1 / 2),
    "rotated k is cast": (case({0: 1, **ONE}, {0: 1}, ONE, (1, 0), turned=1), 64, 1 / 2),
    # A's logit is 64 + 1 / 8, where bfloat16's values are 1 / 2 apart; exp(-1 / 8) is cast.
    "logits are not cast": (
        case({2: 1, 3: 1}, {2: 1, 3: BELOW_ROUNDING}, ONE, (1, -1)),
        64,
        (1 - 0.8828125) / (1 + np.exp(-1 / 8)),
    ),
    # Probabilities of 1 and exp(-2 ** -10), which is cast to 1.
    "probabilities are cast": (case(ONE, ONE, {}, (1, -1)), 2.0**-10, 0),
    # (1.875 + 0.5859375) / (1 + exp(-17 / 32)) = 1.5498; over 1.5859375 it would be 1.5517, and
    # between them lies a boundary.
    "the normaliser's are not": (case(ONE, ONE, {}, (1.875, 1)), 17 / 32, 1.546875),
}


class RoundingContract:
    """Subclasses have `attend(case, scale)`, which returns [tokens, heads, head_dim]."""

    @pytest.mark.parametrize("name", CASES)
    def test_it_rounds_where_it_says(self, name):
        made, scale, expected = CASES[name]
        found = float(self.attend(made, float(scale))[0, 0, 0])
        assert found == pytest.approx(expected, rel=2e-3, abs=1e-6)
