"""The table of launches: what `launches.json` holds and how a call's launch is found in it.

The file has an object for each GPU by name, and "default" for every other. Its `launches` are rows,
the more specific ones first: the first whose conditions all hold is taken or, if there is none, the
first such row of "default". A condition that a row leaves out always holds.
`compute_capability` lets a GPU that is not in the table use the rows of one of its generation.

This file is the same in both kernel packages, which do not import each other.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

KERNELS = (
    *("window", "window_backward", "wide"),
    *("stream", "rotating_stream", "stream_backward_q", "stream_backward_kv"),
    "rotate",
)
OPERANDS = ("half", "single", "unaligned")
DEFAULT = "default"
# What a row says in the file, and what it may say.
_REQUIRED = {"kernel", "block", "block_k", "num_warps", "num_stages"}
_KNOWN = _REQUIRED | {"operands", "max_head_dim", "max_length", "max_rows", "maxnreg"}
_KNOWN |= {"columns", "out_columns"}
_POWERS = {"block", "block_k", "num_warps", "columns", "out_columns"}
# Shapes whose launches are remembered; every image size may be another one.
_REMEMBERED = 4096


class Launch(NamedTuple):
    """How one kernel is launched."""

    block: int  # rows of a query tile; in the rotate kernel of its only tile
    block_k: int  # rows of a key tile; in the rotate kernel heads of a program
    num_warps: int  # of a program
    # Of the loads that Triton pipelines. The window backward kernel has no loop: it loads all at
    # once (1), or each tile in front of its products (more), which keeps fewer at a time.
    num_stages: int
    # Upper bound on a thread's registers, of which fewer let more programs share a multiprocessor;
    # None: the compiler's choice. XLA, where it compiles Pallas' kernels, takes no bound.
    maxnreg: int | None = None
    # Columns of a chunk of Q and K, of heads that no tile holds, and those of V that a program of
    # the stream kernel has; None: a head at once.
    columns: int | None = None
    out_columns: int | None = None


class Gpu(NamedTuple):
    """What a GPU calls itself, and its compute capability as in "9.0"."""

    name: str
    compute_capability: str


class Shape(NamedTuple):
    """What a launch depends on."""

    kernel: str  # one of KERNELS; "rotating_stream" is the stream kernel where it rotates K
    operands: str  # one of OPERANDS: bf16 or fp16, fp32, or rows that miss an alignment to 16 bytes
    head_dim: int
    length: int  # tokens of the longest segment
    rows: int  # tokens times heads: a call has few programs or many for the multiprocessors


@dataclass(frozen=True)
class Row:
    """A launch, and the shapes it is for: the names of Shape, and its numbers up to a largest.

    A condition that is None always holds.
    """

    kernel: str
    launch: Launch
    operands: str | None = None
    max_head_dim: int | None = None
    max_length: int | None = None
    max_rows: int | None = None

    def holds(self, shape: Shape) -> bool:
        """Whether the row is for this shape."""
        kernel, operands, *numbers = shape
        largest = self.max_head_dim, self.max_length, self.max_rows
        if self.kernel != kernel or self.operands not in (None, operands):
            return False
        return all(most is None or n <= most for n, most in zip(numbers, largest, strict=True))

    def to_json(self) -> dict[str, Any]:
        """The row as it stands in the file."""
        values = vars(self) | self.launch._asdict()
        return {name: x for name, x in values.items() if x is not None and name != "launch"}

    @classmethod
    def from_json(cls, values: Any) -> "Row":
        """The inverse of to_json; a ValueError says what is wrong with the row."""
        if not isinstance(values, dict):
            raise ValueError(f"expected an object, got {values!r}")
        if missing := _REQUIRED - values.keys():
            raise ValueError(f"{', '.join(sorted(missing))} missing in {values}")
        if unknown := values.keys() - _KNOWN:
            raise ValueError(f"expected only {', '.join(sorted(_KNOWN))}, got {', '.join(unknown)}")
        for name, value in values.items():
            if name in ("kernel", "operands"):
                choices = KERNELS if name == "kernel" else OPERANDS
                if value not in choices:
                    raise ValueError(f"{name} must be one of {choices}, got {value!r}")
            elif type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
            elif name in _POWERS and value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        # A window has to fit into its tile.
        window = values["kernel"].startswith(("window", "wide"))
        if window and values.get("max_length", 1 << 30) > values["block"]:
            raise ValueError(f"a window's max_length must be given and at most block, in {values}")
        launch = {name: values[name] for name in Launch._fields if name in values}
        others = {name: values[name] for name in values.keys() - launch.keys()}
        return cls(launch=Launch(**launch), **others)


@dataclass(frozen=True)
class Device:
    """One GPU's rows; compute_capability is None for "default"."""

    compute_capability: str | None
    rows: tuple[Row, ...]


class Table:
    """Launches by device.

    The latest lookups are remembered, so that a call pays for one dictionary access.
    """

    def __init__(self, devices: Mapping[str, Device]) -> None:
        """Devices by name; ValueError where there is no "default"."""
        if DEFAULT not in devices:
            raise ValueError(f"a table of launches needs a device {DEFAULT!r}")
        self.devices = dict(devices)
        # Of each compute capability its first device.
        self._generations = {x.compute_capability: x for x in reversed(self.devices.values())}
        self._find = functools.lru_cache(_REMEMBERED)(self._first_row)

    def find(self, gpu: Gpu | None, shape: Shape) -> Launch:
        """The launch for a shape on a GPU; None: no known GPU, which gets the default.

        Raises:
            ValueError: no row is for the shape.
        """
        return self._find(gpu, shape)

    def with_rows(self, gpu: Gpu, rows: Sequence[Row]) -> "Table":
        """A table in which a GPU has these rows instead of those it had, in the order of lookup."""

        def place(row: Row) -> tuple:
            # The narrower condition first: one that is left out is the widest. Whether a call is
            # small counts before how long its segments are.
            largest = row.max_head_dim, row.max_rows, row.max_length
            return KERNELS.index(row.kernel), row.operands or "~", *(n or 1 << 60 for n in largest)

        device = Device(gpu.compute_capability, tuple(sorted(rows, key=place)))
        devices = self.devices | {gpu.name: device}
        devices[DEFAULT] = devices.pop(DEFAULT)  # last, as it is looked up
        return Table(devices)

    def _first_row(self, gpu: Gpu | None, shape: Shape) -> Launch:
        default = own = self.devices[DEFAULT]
        if gpu is not None:
            of_generation = self._generations.get(gpu.compute_capability, default)
            own = self.devices.get(gpu.name, of_generation)
        for row in (*own.rows, *default.rows):
            if row.holds(shape):
                return row.launch
        raise ValueError(f"the table of launches has none for {shape}")

    def to_text(self) -> str:
        """The file's content: JSON, a line for each row."""
        blocks = []
        for name, device in self.devices.items():
            name, capability = json.dumps(name), json.dumps(device.compute_capability)
            rows = ",\n".join(f"   {json.dumps(row.to_json())}" for row in device.rows)
            head = f' {name}: {{\n  "compute_capability": {capability},\n  "launches": [\n'
            blocks.append(f"{head}{rows}\n  ]\n }}")
        return "{\n" + ",\n".join(blocks) + "\n}\n"

    @classmethod
    def from_text(cls, text: str) -> "Table":
        """The inverse of to_text; a ValueError says what is wrong, at which device and row."""
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"expected an object of devices, got {type(content).__name__}")
        devices = {}
        for name, device in content.items():
            if not isinstance(device, dict) or device.keys() != {"compute_capability", "launches"}:
                raise ValueError(f"{name}: expected an object of compute_capability and launches")
            if not isinstance(device["launches"], list):
                raise ValueError(f"{name}: expected launches to be a list")
            rows = []
            for index, values in enumerate(device["launches"]):
                try:
                    rows.append(Row.from_json(values))
                except ValueError as error:
                    raise ValueError(f"{name}, row {index}: {error}") from None
            devices[name] = Device(device["compute_capability"], tuple(rows))
        return cls(devices)

    @classmethod
    def read(cls, path: Path) -> "Table":
        """from_text of a file, whose errors name the file; OSError where it cannot be read."""
        try:
            return cls.from_text(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no table of launches: {error}") from None


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
