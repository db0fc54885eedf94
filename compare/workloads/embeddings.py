"""What embeddings are measured on: one head from narrow to very wide, rotated and added positions.

A workload's name gives its family and its shape: `rope_fp32-128x64x2048` is 128 segments of 64
tokens, one head of 2,048 columns.
"""

import re
from typing import NamedTuple, get_args

from compare.workloads.kernels import SEGMENT_FRAMES, Embedding, KernelWorkload


class Shape(NamedTuple):
    """So many segments of so many tokens, and the columns of the head."""

    segments: int
    length: int
    width: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
# A cell's Q holds so many elements, at 80 columns a quarter more: enough to fill a GPU. Wide heads
# get more, as their programs are fewer.
_ELEMENTS, _ELEMENTS_IF_WIDE, _WIDE = 1 << 22, 1 << 24, 1024
_WIDTHS = (64, 80, 128, 512, 2048, 4096, 8192, 16384)
_LENGTHS = (16, 64, 1024)
# Of longer segments wider heads are no attention that anybody computes: it would be all products.
_WIDEST_LONG = 4096
# Of the widths above.
_CUDNN_WIDEST, _CUDNN_JAX_WIDEST, _FFPA_WIDTH = 128, 128, 512
_FLEX_WIDEST = {"fp32": 128, "bf16": 512}

# What targets and write-ups name: one segment alone, many, long ones.
NAMED_SHAPES = tuple(
    Shape(*shape)
    for shape in (
        *((1, 64, width) for width in (128, 512, 2048, 4096)),
        *((1, 16, 8192), (1, 16, 16384)),
        *((128, 64, 512), (128, 64, 2048), (64, 64, 4096), (64, 64, 16384)),
        *((4, 1024, 512), (4, 4096, 512)),
    )
)
# Of these, where every peer is tried: elsewhere those that could win.
_EVERY_PEER = (Shape(1, 64, 512), Shape(128, 64, 512), Shape(4, 1024, 512))


def grid() -> list[Shape]:
    """Every width over every length, with enough segments to fill a GPU."""
    return [
        Shape(elements // (length * (64 if width == 80 else width)), length, width)
        for width in _WIDTHS
        for length in _LENGTHS
        for elements in [_ELEMENTS_IF_WIDE if width > _WIDE else _ELEMENTS]
        if length < max(_LENGTHS) or width <= _WIDEST_LONG
    ]


def workload(embedding: Embedding, precision: str, shape: Shape) -> KernelWorkload:
    """One head of a shape, positions rotated or added; the precision is a key of PRECISIONS."""
    peers = None if shape in _EVERY_PEER else _takers(embedding, precision, shape.width)
    return KernelWorkload(
        f"{embedding}_{precision}-{shape}",
        "frames",
        ((1, *SEGMENT_FRAMES[shape.length]),) * shape.segments,
        heads=1,
        head_dim=shape.width,
        dtype=PRECISIONS[precision],
        embedding=embedding,
        peers=peers,
    )


def _takers(embedding: Embedding, precision: str, width: int) -> tuple[str, ...]:
    """Names of the peers that take a head, where others would only say that they do not.

    PyTorch takes its math backend by itself where nothing else takes a head.
    """
    behind = ["SDPA", "mem-efficient SDPA"]
    in_bf16 = precision == "bf16"
    if in_bf16 and width <= _CUDNN_WIDEST:
        behind.append("cuDNN SDPA")
    if width <= _FLEX_WIDEST[precision]:
        behind.append("FlexAttention")
    if in_bf16 and width == _FFPA_WIDTH:
        behind += ["ffpa-attn", "ffpa-attn CuTeDSL"]
    cudnn = ("cuDNN (jax.nn)",) if in_bf16 and width <= _CUDNN_JAX_WIDEST else ()
    return (
        *(f"torch.compile {embedding} + {name}" for name in behind),
        *(f"XLA {embedding} + {name}" for name in ("XLA attention", *cudnn)),
    )


def parsed(name: str) -> tuple[str, str, Shape] | None:
    """Embedding, precision and shape that a workload's name tells; None of other names."""
    found = re.fullmatch(r"([a-z]+)_([a-z0-9]+)-(\d+)x(\d+)x(\d+)", name)
    if found is None:
        return None
    embedding, precision, *sizes = found.groups()
    return embedding, precision, Shape(*map(int, sizes))


EMBEDDING_WORKLOADS = {
    made.name: made
    for embedding in get_args(Embedding)
    for precision in PRECISIONS
    for shape in dict.fromkeys([*NAMED_SHAPES, *grid()])
    for made in [workload(embedding, precision, shape)]
}
