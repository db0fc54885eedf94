"""Which code of transformers' layers computes what ours does.

A layer is known by what its forward says, not by the name of its class: models share code, and
versions change it. Whatever stands here was tested against Hugging Face's own classes.
"""

import ast
import functools
import hashlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

# Whose functions a tower and its layers may run: the model's own, and those that only go on to it,
# compiled for instance, or when weights have been brought over.
_OWN = {"transformers", "torch", "accelerate"}
_MODELS = "transformers.models."


class Form(NamedTuple):
    """How q, k, v and the angles reach an attention, and how its result leaves the layer.

    Attributes:
        inputs: the layers that give q, k and v, or the one that gives all three in this order.
        output: the layer behind the attention.
        angles: the argument that brings the angles themselves, [tokens, head_dim / 2]; None where
            position_embeddings brings cos and sin.
        weighed: whether attention weights are returned too; flash attention has None for them.
        normed: whether the heads of q and k are normalised before the rotation, by NORMS.
        grouped: whether k and v may have fewer heads than q.
    """

    inputs: tuple[str, ...]
    output: str
    angles: str | None = None
    weighed: bool = False
    normed: bool = False
    grouped: bool = False

    @property
    def layers(self) -> tuple[str, ...]:
        """All that the attention holds."""
        return *self.inputs, self.output, *(NORMS if self.normed else ())


NORMS = ("q_norm", "k_norm")
_PACKED = Form(("qkv",), "proj")
_NORMED = _PACKED._replace(normed=True)
_GROUPED = _PACKED._replace(grouped=True)
_OMNI = Form(("q", "k", "v"), "proj")
_SEPARATE = Form(("q_proj", "k_proj", "v_proj"), "proj")
_PADDLE = Form(("q_proj", "k_proj", "v_proj"), "out_proj", weighed=True)
_LFM = _PADDLE._replace(normed=True, grouped=True)

# By fingerprint. A comment says from which version of transformers on a forward reads like that.
ATTENTIONS = {
    "07a03a2db1a0": _PACKED,  # 4.57
    "79206f7c64be": _PACKED,  # 5.0
    "21257519f787": _PACKED,  # 5.1
    "fc8249bc01cb": _PACKED,  # 5.2
    "039a33ababcf": _PACKED,  # 5.10
    "7d98c241024f": _PACKED,  # 5.15
    "5ce91df6b0ad": _OMNI._replace(angles="rotary_pos_emb"),  # 4.57
    "69f0743da9dd": _OMNI._replace(angles="rotary_pos_emb"),  # 5.0
    "12a6c147f945": _OMNI._replace(angles="rotary_pos_emb"),  # 5.1
    "912297d22151": _OMNI._replace(angles="rotary_pos_emb"),  # 5.2
    "0967a4f4a13f": _OMNI._replace(angles="position_embeddings"),  # 5.10
    "3c2944083a2c": _OMNI._replace(angles="position_embeddings"),  # 5.15
    "b0653008c05a": _OMNI,  # 5.17
    "1f390c60c681": _SEPARATE,  # 5.13
    "6e8f40529f2c": _SEPARATE,  # 5.15
    "0bff596e4fac": _PADDLE,  # 5.0
    "99d2dad20e71": _PADDLE,  # 5.1
    "c4976b29cda6": _PADDLE,  # 5.2
    "31a2d5b2c27d": _PADDLE,  # 5.15
    "1c2fdf69c26f": _NORMED,  # 5.1
    "840a5e9fcafb": _NORMED,  # 5.2
    "b166be2f06c8": _NORMED,  # 5.10
    "1a7951e41873": _NORMED,  # 5.15
    "eedfe46e10b2": _GROUPED,  # 5.9
    "d049afc70297": _GROUPED,  # 5.15
    "f250c2068633": _LFM,  # 5.24
}
LAYERS = {layer for form in ATTENTIONS.values() for layer in form.layers}
RMS_NORMS = {"9635bcd843f3"}
GATED_MLPS = {"0d7b11835db6"}
MLPS = {"2fe27664d995"}


def forward_of(module: Any) -> Callable[..., Any]:
    """What a call of a module runs."""
    return vars(module).get("forward", type(module).forward)


def foreign_home(forward: Callable[..., Any]) -> str | None:
    """Where the first of the functions that a forward runs is from that is not transformers' own.

    By where a function finds its globals: wrappers take on the names of what they wrap.
    """
    homes = map(_home, _functions(forward))
    return next((home for home in homes if home.partition(".")[0] not in _OWN), None)


def fingerprint(forward: Callable[..., Any]) -> str | None:
    """A hash of what a forward says, and the functions that it calls of the model's own file.

    Decorators, docstrings and annotations don't count. None where there is no source to read.
    """
    functions = [f for f in _functions(forward) if not hasattr(f, "__wrapped__")]
    try:
        texts = [text_of(f.__code__) for f in functions if _home(f).startswith(_MODELS)]
    except (SyntaxError, ValueError):
        return None
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _functions(forward: Any) -> Iterator[Any]:
    """A forward, what it wraps, and what the models' files have for it to call; each once."""
    pending, seen = [forward], []
    while pending:
        function = pending.pop(0)
        function = getattr(function, "func", function)  # of a functools.partial
        function = getattr(function, "__func__", function)  # of a bound method
        if function in seen:
            continue
        seen.append(function)
        yield function
        if hasattr(function, "__wrapped__"):
            pending.append(function.__wrapped__)
        elif _home(function).startswith(_MODELS):
            called = map(function.__globals__.get, sorted(_names(function.__code__)))
            pending += [f for f in called if isinstance(f, FunctionType)]


def _home(function: Any) -> str:
    return getattr(function, "__globals__", {}).get("__name__", type(function).__module__)


def _names(code: CodeType) -> set[str]:
    """Names that a function looks up, those in its comprehensions among them."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


@functools.cache
def text_of(code: CodeType) -> str:
    """What a function says, without decorators, docstrings and annotations.

    Raises:
        SyntaxError, ValueError: there is no source to read.
    """
    # inspect.getsource would look through all modules for the one of the file.
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    (tree,) = ast.parse(textwrap.dedent("".join(inspect.getblock(lines)))).body
    return ast.unparse(_Bare().visit(tree))


class _Bare(ast.NodeTransformer):
    """Leaves away what doesn't change what a function computes."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)
