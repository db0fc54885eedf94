"""What this GPU can do at most, measured in the same run, and the floors that follow from it."""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from compare.bench.timing import elapsed_ms
from compare.common.console import say

# As many bytes as the 1344 px workload moves: a smaller copy is slower, a larger one faster, and
# the floor should be one that a kernel of this size could reach.
_COPY_BYTES = 47 << 20
_LARGE_COPY_BYTES = 1 << 29
_MATRIX_SIDE = 8192
_SAMPLES = 15


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one GPU.

    Attributes:
        copy_bytes_per_s: bytes read plus bytes written by an elementwise copy of 94 MiB in all.
        large_copy_bytes_per_s: the same for 1 GiB in all.
        matrix_flops_per_s: of a bf16 product of random matrices of 8192 x 8192, the best of some
            samples: products soon take the GPU to its power limit, where it lowers its clock.
    """

    copy_bytes_per_s: float
    large_copy_bytes_per_s: float
    matrix_flops_per_s: float

    def to_json(self) -> dict[str, float]:
        """For a result file."""
        return asdict(self)

    def kernel_floor_us(self, bytes_moved: int, matrix_flops: int) -> float:
        """Least microseconds of a kernel: to move the bytes or to multiply, whichever is longer."""
        return 1e6 * max(
            bytes_moved / self.copy_bytes_per_s, matrix_flops / self.matrix_flops_per_s
        )

    def tower_floor_us(self, bytes_moved: int, matrix_flops: int) -> float:
        """Least microseconds of a tower, whose layers run one after the other.

        Those of all products, and those of moving the windows' bytes.
        """
        return 1e6 * (bytes_moved / self.copy_bytes_per_s + matrix_flops / self.matrix_flops_per_s)


def measure() -> Ceilings:
    """Measure the GPU's ceilings and print them; takes about a second."""
    shape = (_MATRIX_SIDE, _MATRIX_SIDE)
    # Random values: on zeros a product draws less power and runs faster than on any real data.
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    # The least: how soon the clock drops depends on what the GPU did before.
    matrix_s = min(_seconds([lambda: torch.matmul(a, b, out=product)], calls=5))
    ceilings = Ceilings(
        copy_bytes_per_s=_copy_rate(_COPY_BYTES, sets=8),
        large_copy_bytes_per_s=_copy_rate(_LARGE_COPY_BYTES, sets=2),
        matrix_flops_per_s=2 * _MATRIX_SIDE**3 / matrix_s,
    )
    say(
        f"Ceilings: copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s "
        f"(1 GiB: {ceilings.large_copy_bytes_per_s / 1e12:.2f}), "
        f"bf16 products {ceilings.matrix_flops_per_s / 1e12:.0f} TFLOP/s"
    )
    return ceilings


def _copy_rate(size: int, sets: int) -> float:
    """Bytes a second of an elementwise kernel that reads `size` bytes and writes as many."""
    sources = torch.randn(sets, size // 4, device="cuda")
    targets = torch.empty_like(sources)
    copies = [
        lambda source=source, target=target: torch.neg(source, out=target)
        for source, target in zip(sources, targets, strict=True)
    ]
    return 2 * size / statistics.median(_seconds(copies, calls=4 * sets))


def _seconds(rotating: list[Callable[[], object]], calls: int) -> list[float]:
    """Samples of the seconds a call, of calls that are queued without waiting in between."""
    queued = list(itertools.islice(itertools.cycle(rotating), calls))
    samples = [elapsed_ms(queued) / 1e3 / calls for _ in range(_SAMPLES + 3)]
    return samples[3:]  # the first ones warm up
