"""What embeddings are measured on: one head from narrow to very wide, rotated and added positions.

A workload's name gives its family and its shape: `rope_fp32-128x64x2048` is 128 segments of 64
tokens, one head of 2,048 columns.
"""

from typing import get_args

from compare.workloads.kernels import SEGMENT_FRAMES, Embedding, KernelWorkload

Shape = tuple[int, int, int]  # segments, tokens of each, columns

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
# A cell's Q holds so many elements, at 80 columns a quarter more: enough to fill a GPU. Wide heads
# get more, as their programs are fewer.
_ELEMENTS, _ELEMENTS_IF_WIDE, _WIDE = 1 << 22, 1 << 24, 1024
_WIDTHS = (64, 80, 128, 512, 2048, 4096, 8192, 16384)
_LENGTHS = (16, 64, 1024)
# Of longer segments wider heads are no attention that anybody computes: it would be all products.
_WIDEST_LONG = 4096

# What targets and write-ups name: one segment alone, many, and long ones.
NAMED_SHAPES: tuple[Shape, ...] = (
    *((1, 64, width) for width in (128, 512, 2048, 4096)),
    *((1, 16, 8192), (1, 16, 16384)),
    *((128, 64, 512), (128, 64, 2048), (64, 64, 4096), (64, 64, 16384)),
    *((4, 1024, 512), (4, 4096, 512)),
)


def grid() -> list[Shape]:
    """Every width over every length, with enough segments to fill a GPU."""
    return [
        (elements // (length * (64 if width == 80 else width)), length, width)
        for width in _WIDTHS
        for length in _LENGTHS
        for elements in [_ELEMENTS_IF_WIDE if width > _WIDE else _ELEMENTS]
        if length < max(_LENGTHS) or width <= _WIDEST_LONG
    ]


def workload(embedding: Embedding, precision: str, shape: Shape) -> KernelWorkload:
    """One head of a shape, positions rotated or added; the precision is a key of PRECISIONS."""
    segments, length, width = shape
    return KernelWorkload(
        f"{embedding}_{precision}-{segments}x{length}x{width}",
        "frames",
        ((1, *SEGMENT_FRAMES[length]),) * segments,
        heads=1,
        head_dim=width,
        dtype=PRECISIONS[precision],
        embedding=embedding,
    )


EMBEDDING_WORKLOADS = {
    made.name: made
    for embedding in get_args(Embedding)
    for precision in PRECISIONS
    for shape in dict.fromkeys([*NAMED_SHAPES, *grid()])
    for made in [workload(embedding, precision, shape)]
}
