"""What every implementation refuses, and that the message says what was expected and what came.

An implementation's tests inherit ArgumentContract and an adapter of its framework, which has
`package`, `implementation` and `array(numpy_array)`.
"""

import inspect

import numpy as np
import pytest

from tests.kernel_cases import DTYPES, make_case

BF16 = DTYPES["bfloat16"]
CASE = make_case([5, 7], head_dim=16)  # 12 tokens, 2 heads

# What is wrong: the arguments in place of the right ones, the exception, its message.
WRONG_SEPARATE = {
    "q of integers": (
        {"q": np.zeros((12, 2, 16), np.int32)},
        TypeError,
        r"q must be bfloat16, float16 or float32, got (torch\.)?int32",
    ),
    "v of integers": (
        {"v": np.zeros((12, 2, 16), np.int8)},
        TypeError,
        r"v must be bfloat16, float16 or float32, got (torch\.)?int8",
    ),
    "q of float64": (
        {"q": np.zeros((12, 2, 16), np.float64)},
        TypeError,
        r"q must be bfloat16, float16 or float32, got (torch\.)?float64",
    ),
    "q without heads": (
        {"q": np.zeros((12, 16), BF16)},
        ValueError,
        r"q must have shape \[tokens, heads, head_dim\], got \(12, 16\)",
    ),
    "q of one axis": (
        {"q": np.zeros(12, BF16)},
        ValueError,
        r"q must have shape \[tokens, heads, head_dim\], got \(12,\)",
    ),
    "q of no axis": (
        {"q": np.zeros((), BF16)},
        ValueError,
        r"q must have shape \[tokens, heads, head_dim\], got \(\)",
    ),
    "k of other tokens": (
        {"k": np.zeros((11, 2, 16), BF16)},
        ValueError,
        r"k must have the dtype and shape of q, .*bfloat16 \(12, 2, 16\), but for fewer heads that "
        r"divide its own, got .*bfloat16 \(11, 2, 16\)",
    ),
    "k of heads that don't divide q's": (
        dict.fromkeys("kv", np.zeros((12, 3, 16), BF16)),
        ValueError,
        r"k must have the dtype and shape of q, .* fewer heads .* got .* \(12, 3, 16\)",
    ),
    "k of no heads": (
        dict.fromkeys("kv", np.zeros((12, 0, 16), BF16)),
        ValueError,
        r"k must have the dtype and shape of q, .* fewer heads .* got .* \(12, 0, 16\)",
    ),
    "v of fewer heads": (
        {"v": np.zeros((12, 1, 16), BF16)},
        ValueError,
        r"v must have the dtype and shape of k, .* \(12, 2, 16\), got .* \(12, 1, 16\)",
    ),
    "v of another dtype": (
        {"v": np.zeros((12, 2, 16), np.float16)},
        ValueError,
        r"v must have the dtype and shape of k, .*bfloat16 .*, got .*float16",
    ),
    "too many segments times heads": (
        {
            **dict.fromkeys("qkv", np.zeros((12, 1024, 16), BF16)),
            "cu_seqlens": np.zeros(2**21 + 1, np.int32),
        },
        ValueError,
        "segments x heads must be at most 2147483647, got 2147483648",
    ),
}
WRONG_PACKED = {
    "qkv of integers": (
        {"qkv": np.zeros((12, 3, 2, 16), np.int32)},
        TypeError,
        r"qkv must be bfloat16, float16 or float32, got (torch\.)?int32",
    ),
    "qkv of three axes": (
        {"qkv": np.zeros((12, 6, 16), BF16)},
        ValueError,
        r"qkv must have shape \[tokens, 3, heads, head_dim\], got \(12, 6, 16\)",
    ),
    "qkv of one axis": (
        {"qkv": np.zeros(12, BF16)},
        ValueError,
        r"qkv must have shape \[tokens, 3, heads, head_dim\], got \(12,\)",
    ),
    "qkv of two parts": (
        {"qkv": np.zeros((12, 2, 2, 16), BF16)},
        ValueError,
        r"qkv must have shape \[tokens, 3, heads, head_dim\], got \(12, 2, 2, 16\)",
    ),
}
WRONG_IN_BOTH = {
    "cos of bfloat16": (
        {"cos": np.ones((12, 8), BF16)},
        TypeError,
        r"cos must be float32 .* got (torch\.)?bfloat16",
    ),
    "sin of float16": (
        {"sin": np.ones((12, 8), np.float16)},
        TypeError,
        r"sin must be float32 .* got (torch\.)?float16",
    ),
    "cos of other tokens": (
        {"cos": np.ones((11, 8), np.float32)},
        ValueError,
        r"cos must have shape \[12 tokens, rotary_dim / 2\] .* got \(11, 8\)",
    ),
    "cos of one axis": (
        {"cos": np.ones(12, np.float32)},
        ValueError,
        r"cos must have shape \[12 tokens, .* got \(12,\)",
    ),
    "cos wider than a head": (
        {"cos": np.ones((12, 9), np.float32)},
        ValueError,
        r"cos must have shape .* rotary_dim at most 16, got \(12, 9\)",
    ),
    "cos of no columns": (
        {"cos": np.ones((12, 0), np.float32)},
        ValueError,
        r"cos must have shape .* got \(12, 0\)",
    ),
    "sin unlike cos": (
        {"sin": np.ones((12, 4), np.float32)},
        ValueError,
        r"sin must have the shape (and strides )?of cos, \(12, 8\).* got \(12, 4\)",
    ),
    "cu_seqlens of int16": (
        {"cu_seqlens": np.zeros(3, np.int16)},
        TypeError,
        r"cu_seqlens must be int32, got (torch\.)?int16",
    ),
    "cos of float64": (
        {"cos": np.ones((12, 8), np.float64)},
        TypeError,
        r"cos must be float32 .* got (torch\.)?float64",
    ),
    "cu_seqlens of int64": (
        {"cu_seqlens": np.array([0, 5, 2**32 + 12])},
        TypeError,
        r"cu_seqlens must be int32, got (torch\.)?int64",
    ),
    "cu_seqlens of floats": (
        {"cu_seqlens": np.zeros(3, np.float32)},
        TypeError,
        r"cu_seqlens must be int32, got (torch\.)?float32",
    ),
    "too many segments": (
        {"cu_seqlens": np.zeros(2**22 + 2, np.int32)},
        ValueError,
        r"at most 4194304 segments are supported, got 4194305",
    ),
    "cu_seqlens of two axes": (
        {"cu_seqlens": np.zeros((3, 1), np.int32)},
        ValueError,
        r"cu_seqlens must be a .*vector of segments \+ 1 values, got shape \(3, 1\)",
    ),
    "cu_seqlens without a value": (
        {"cu_seqlens": np.zeros(0, np.int32)},
        ValueError,
        r"cu_seqlens must be a .*vector .* got shape \(0,\)",
    ),
    "negative max_seqlen": (
        {"max_seqlen": -1},
        ValueError,
        "max_seqlen must be an int of at least 0 or None, got -1",
    ),
    "max_seqlen of a float": (
        {"max_seqlen": 8.0},
        ValueError,
        r"max_seqlen must be an int of at least 0 or None, got 8\.0",
    ),
    "scale of zero": (
        {"scale": 0.0},
        ValueError,
        r"scale must be from 2\*\*-100 to 2\*\*100 or None, got 0\.0",
    ),
    "scale of zero in fp16": (
        {"scale": np.float16(0)},
        ValueError,
        r"scale must be from 2\*\*-100 to 2\*\*100 or None, got .*0\.0",
    ),
    "negative scale": (
        {"scale": -0.25},
        ValueError,
        r"scale must be from 2\*\*-100 to 2\*\*100 or None, got -0\.25",
    ),
    "infinite scale": (
        {"scale": float("inf")},
        ValueError,
        r"scale must be from 2\*\*-100 to 2\*\*100 or None, got inf",
    ),
    "scale that is 0 in fp32": (
        {"scale": 1e-300},
        ValueError,
        r"scale must be from 2\*\*-100 to 2\*\*100 or None, got 1e-300",
    ),
    "scale that leaves logits no room": (
        {"scale": 2e38},
        ValueError,
        r"scale must be from 2\*\*-100 to 2\*\*100 or None, got 2e\+38",
    ),
    "scale beyond floats": (
        {"scale": 10**400},
        ValueError,
        r"scale must be from 2\*\*-100 to 2\*\*100 or None, got 1000",
    ),
    "scale that is no number": (
        {"scale": float("nan")},
        ValueError,
        r"scale must be from 2\*\*-100 to 2\*\*100 or None, got nan",
    ),
    "scale in words": (
        {"scale": "0.25"},
        ValueError,
        r"scale must be from 2\*\*-100 to 2\*\*100 or None, got '0\.25'",
    ),
    "a scale for each head": (
        {"scale": np.array([0.25, 0.5])},
        ValueError,
        r"scale must be from 2\*\*-100 to 2\*\*100 or None, got \w+\(\[0\.25",
    ),
    "q_norm of other columns": (
        {"q_norm": np.ones(8, BF16)},
        ValueError,
        r"q_norm must be \[16\] .*bfloat16, as the heads are, or None, got \(8,\) .*bfloat16",
    ),
    "k_norm of another dtype": (
        {"k_norm": np.ones(16, np.float32)},
        ValueError,
        r"k_norm must be \[16\] .*bfloat16, .*, got \(16,\) .*float32",
    ),
    "q_norm in a list": (
        {"q_norm": [1.0] * 16},
        TypeError,
        r"q_norm must be a \w+\.\w+, got list",
    ),
    "negative norm_eps": (
        {"norm_eps": -1e-6, "q_norm": np.ones(16, BF16)},
        ValueError,
        "norm_eps must be from 0 to 1, got -1e-06",
    ),
    "norm_eps in words": (
        {"norm_eps": "1e-6", "k_norm": np.ones(16, BF16)},
        ValueError,
        "norm_eps must be from 0 to 1, got '1e-6'",
    ),
    "unknown fuse": (
        {"fuse": "k"},
        ValueError,
        r"fuse must be one of .*'auto', 'qk', 'q', 'none'.* got 'k'",
    ),
    "batch_invariant by a number": (
        {"batch_invariant": 1},
        ValueError,
        "batch_invariant must be True or False, got 1",
    ),
    "unknown implementation": (
        {"implementation": "cuda"},
        ValueError,
        r"implementation must be .*'auto', 'kernel'.*'reference'.* got 'cuda'",
    ),
}
# Of the functions that add sin and cos, the tables' names left out.
POSITIONS = np.arange(12, dtype=np.int32)
NO_TABLES = {"cos": None, "sin": None}
WRONG_SINUSOIDAL = {
    "cos of another width": (
        {"cos": np.ones((12, 4), np.float32)},
        ValueError,
        r"cos must have shape \[12 tokens, 8\], half of head_dim, got \(12, 4\)",
    ),
    "tables and positions": (
        {"positions": POSITIONS},
        ValueError,
        "give either cos and sin or positions alone, got cos and sin and positions",
    ),
    "one table and positions": (
        {"cos": None, "positions": POSITIONS},
        ValueError,
        "give either cos and sin or positions alone, got sin and positions",
    ),
    "neither": (
        NO_TABLES,
        ValueError,
        "give either cos and sin or positions alone, got neither",
    ),
    "positions of floats": (
        NO_TABLES | {"positions": np.ones(12, np.float32)},
        TypeError,
        r"positions must be int32, got (torch\.)?float32",
    ),
    "positions of other tokens": (
        NO_TABLES | {"positions": POSITIONS[:11]},
        ValueError,
        r"positions must have shape \[12 tokens\], got \(11,\)",
    ),
    "positions in a list": (
        NO_TABLES | {"positions": [1] * 12},
        TypeError,
        r"positions must be a \w+\.\w+, got list",
    ),
}

WRONG_HEAD_DIMS = [0, 4, 12, 84, 16392]

# cu_seqlens, tokens, max_seqlen, message.
WRONG_CU_SEQLENS = [
    (
        (-1, 4),
        9,
        None,
        r"cu_seqlens\[0\] must be in 0\.\.9 \(tokens\), got -1",
    ),
    (
        (0, 4, 10),
        9,
        None,
        r"cu_seqlens\[2\] must be in 0\.\.9 \(tokens\), got 10",
    ),
    (
        (0, 5, 4, 9),
        9,
        None,
        r"must not decrease, got cu_seqlens\[1\] = 5 and cu_seqlens\[2\] = 4",
    ),
    (
        (0, 2, 7),
        9,
        4,
        r"segment 1 \(2 to 7\) is 5 tokens long, above max_seqlen = 4",
    ),
]

KEYWORDS = {
    "max_seqlen": None,
    "scale": None,
    "fuse": "auto",
    "implementation": "auto",
    "batch_invariant": False,
    "q_norm": None,
    "k_norm": None,
    "norm_eps": 1e-6,
}


def named(table):
    return pytest.mark.parametrize(("wrong", "error", "message"), table.values(), ids=table)


class ArgumentContract:
    """Inherited by the tests of each implementation."""

    @pytest.fixture
    @staticmethod
    def separate():
        names = ("q", "k", "v", "cos", "sin", "cu_seqlens")
        return dict(zip(names, CASE.separate, strict=True), max_seqlen=8)

    @pytest.fixture
    @staticmethod
    def packed():
        names = ("qkv", "cos", "sin", "cu_seqlens")
        return dict(zip(names, CASE.packed, strict=True), max_seqlen=8)

    def call(self, arguments, embedding="rope"):
        arguments = {"implementation": self.implementation, **arguments}
        arguments = {
            name: self.array(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()
        }
        form = "_qkvpacked" if "qkv" in arguments else ""
        return getattr(self.package, f"fused_{embedding}_attention{form}")(**arguments)

    def test_the_right_arguments_are_accepted(self, separate, packed):
        assert self.call(separate).shape == self.call(packed).shape == (12, 2, 16)

    def test_names_order_and_defaults(self):
        for function, first in (
            (self.package.fused_rope_attention, ["q", "k", "v"]),
            (self.package.fused_rope_attention_qkvpacked, ["qkv"]),
        ):
            parameters = inspect.signature(function).parameters
            assert list(parameters) == [*first, "cos", "sin", "cu_seqlens", *KEYWORDS]
            for name, default in KEYWORDS.items():
                assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
                assert parameters[name].default == default

    @named(WRONG_SEPARATE | WRONG_IN_BOTH)
    def test_wrong_arguments(self, separate, wrong, error, message):
        with pytest.raises(error, match=message):
            self.call(separate | wrong)

    @named(WRONG_PACKED | WRONG_IN_BOTH)
    def test_wrong_arguments_packed(self, packed, wrong, error, message):
        with pytest.raises(error, match=message):
            self.call(packed | wrong)

    def test_norms_of_wide_heads(self, separate):
        heads = dict.fromkeys("qkv", np.zeros((12, 2, 264), BF16))
        with pytest.raises(ValueError, match="norm are for heads of up to 256 columns, got 264"):
            self.call(separate | heads | {"k_norm": np.ones(264, BF16)})

    @named(WRONG_SINUSOIDAL)
    def test_wrong_arguments_of_sinusoidal_embeddings(
        self, separate, packed, wrong, error, message
    ):
        for arguments in (separate, packed):
            with pytest.raises(error, match=message):
                self.call(arguments | wrong, "sinusoidal")

    def test_negative_positions(self, packed):
        """Told on a CPU; a GPU's are not waited for, and come out NaN."""
        negative = NO_TABLES | {"positions": POSITIONS - 3}
        if "cpu" in str(self.array(POSITIONS).device).lower():
            with pytest.raises(ValueError, match="positions must be at least 0, got -3"):
                self.call(packed | negative, "sinusoidal")
        else:
            found = self.call(packed | negative, "sinusoidal")
            assert bool((found[:5] != found[:5]).all())

    def test_names_order_and_defaults_of_sinusoidal_embeddings(self):
        keywords = {name: x for name, x in KEYWORDS.items() if "norm" not in name}
        for form, first in (("", ["q", "k", "v"]), ("_qkvpacked", ["qkv"])):
            function = getattr(self.package, f"fused_sinusoidal_attention{form}")
            parameters = inspect.signature(function).parameters
            given = [*first, "cos", "sin", "cu_seqlens", "positions", *keywords]
            assert list(parameters) == given
            for name, default in keywords.items():
                assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
                assert parameters[name].default == default

    def test_tables_of_a_line_and_of_a_grid(self):
        line = np.array([0, 5, 2**20 + 1], np.int32)
        angles = line[:, None] * 10000.0 ** (-np.arange(8) / 8)

        def tables(positions, head_dim):
            made = self.package.sinusoidal_tables(self.array(positions), head_dim)
            return [np.asarray(x.cpu() if hasattr(x, "cpu") else x) for x in made]

        for x, expected in zip(tables(line, 16), (np.cos(angles), np.sin(angles)), strict=True):
            np.testing.assert_allclose(x, expected, rtol=0, atol=1e-6)
        grid = np.stack([line, line[::-1]], axis=1)
        halves = (tables(x.copy(), 8) for x in grid.T)
        expected = [np.concatenate(x, axis=1) for x in zip(*halves, strict=True)]
        np.testing.assert_array_equal(np.stack(tables(grid, 16)), np.stack(expected))
        with pytest.raises(ValueError, match=r"\[tokens\] or \[tokens, 2\], got \(3, 3\)"):
            self.package.sinusoidal_tables(self.array(np.zeros((3, 3), np.int32)), 16)

    @pytest.mark.parametrize("head_dim", WRONG_HEAD_DIMS)
    def test_wrong_head_dim(self, separate, packed, head_dim):
        x = np.zeros((12, 3, 2, head_dim), BF16)
        message = f"head_dim must be a multiple of 8 up to 16384, got {head_dim}$"
        with pytest.raises(ValueError, match=message):
            self.call(separate | {"q": x[:, 0], "k": x[:, 0], "v": x[:, 0]})
        with pytest.raises(ValueError, match=message):
            self.call(packed | {"qkv": x})

    @pytest.mark.parametrize(
        ("cu_seqlens", "tokens", "max_seqlen", "message"), WRONG_CU_SEQLENS, ids=str
    )
    def test_check_cu_seqlens_says_which_value_is_wrong(
        self, cu_seqlens, tokens, max_seqlen, message
    ):
        with pytest.raises(ValueError, match=message):
            self.package.check_cu_seqlens(
                self.array(np.array(cu_seqlens, np.int32)), tokens, max_seqlen
            )

    def test_check_cu_seqlens_checks_the_form_too(self):
        with pytest.raises(TypeError, match=r"cu_seqlens must be a \w+\.\w+, got list"):
            self.package.check_cu_seqlens([0, 4, 9], 9)
        with pytest.raises(TypeError, match="cu_seqlens must be int32"):
            self.package.check_cu_seqlens(self.array(np.zeros(3, np.int16)), 9)
        with pytest.raises(ValueError, match=r"cu_seqlens must be a .*vector"):
            self.package.check_cu_seqlens(self.array(np.zeros((3, 1), np.int32)), 9)
