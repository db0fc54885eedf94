"""The second stage: a tower in each actor, one actor a GPU."""

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
import numpy as np
import pyarrow as pa

from flax_models.common.buckets import choose_bucket
from flax_models.common.config import VisionConfig
from flax_models.common.errors import ImageError
from flax_models.common.finite import is_finite, non_finite_images
from flax_models.common.layout import output_rows
from flax_models.ray_data.calls import call_buckets, plan_calls
from flax_models.ray_data.patches import Report

# From pixel values, grid_thw and one of `OUTPUTS` to its rows, and those of DeepStack's features.
Encode = Callable[[np.ndarray, np.ndarray, str], list[np.ndarray]]

# From a checkpoint, a dtype and the numbers of patches that calls are padded to.
Load = Callable[[str, str, tuple[int, ...]], Encode]

# Short names of what loads a tower: a module and its function `load`, which is a Load. The PyTorch
# tower is of a package further up, which this one may know by name alone.
FRAMEWORKS = {
    "flax": "flax_models.ray_data.flax_tower:load",
    "torch": "compare.torch_tower.ray_data:load",
}


def find_loader(framework: str) -> Load:
    """The function that loads a tower.

    Args:
        framework: one of FRAMEWORKS, or "module:function" of your own.

    Raises:
        ValueError: there is no such function.
        ImportError: its module needs what is not installed.
    """
    module, _, function = FRAMEWORKS.get(framework, framework).partition(":")
    if not function:
        raise ValueError(
            f"framework must be {', '.join(FRAMEWORKS)} or MODULE:FUNCTION, got {framework!r}"
        )
    try:
        return getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not module.startswith(str(error.name)):
            raise
        raise ValueError(f"there is no {function} in {module}") from None


class TowerStage:
    """Encode blocks of rows that have patches; a class of Ray's actors.

    Its calls may come from several threads: while one waits for the GPU, another brings patches
    there.
    """

    def __init__(
        self,
        framework: str,
        checkpoint: str,
        dtype: str,
        output: str,
        store: str,
        budget: int,
        strict: bool,
        report: Report,
    ) -> None:
        """Load the tower; arguments are those of `ray_data.encode`."""
        self.config = VisionConfig.from_pretrained(checkpoint)
        self.buckets = call_buckets(self.config, budget)
        self.encode = find_loader(framework)(checkpoint, dtype, self.buckets)
        self.dtype, self.output, self.store = dtype, output, store
        self.budget, self.strict = budget, strict
        self.busy = _Busy()
        self.report = report
        report(loaded=1)

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        """Encode the rows call by call.

        Yields:
            The rows of each call in the place of patches with the columns "shape" and those of
            the output; rows that were refused without, in a table of their own.
        """
        columns = output_columns(self.config, self.output)
        valid = table["error"].is_null().to_numpy()
        readable = np.flatnonzero(valid)
        if len(readable) < table.num_rows:
            refused = table.filter(pa.array(~valid)).drop_columns(["patches"])
            self.report(refused=refused.num_rows)
            yield _append(refused, columns, [None] * refused.num_rows)
        grids = np.array([table["grid_thw"][row].as_py() for row in readable]).reshape(-1, 3)
        for call in plan_calls(grids.prod(axis=1).tolist(), self.budget):
            rows, grid_thw = readable[call], grids[call]
            buffers = [table["patches"][int(row)].as_buffer() for row in rows]
            parts = [np.frombuffer(buffer, self.dtype) for buffer in buffers]
            pixel_values = np.concatenate(parts).reshape(-1, self.config.patch_dim)
            values, errors = self._run(pixel_values, grid_thw)
            called = table.drop_columns(["patches"]).take(rows)
            if self.strict:
                _raise_first(called, errors)
            place = called.column_names.index("error")
            called = called.set_column(place, "error", pa.array(errors, pa.string()))
            self._report_call(grid_thw, errors)
            yield _append(called, columns, values)

    def _run(
        self, pixel_values: np.ndarray, grid_thw: np.ndarray
    ) -> tuple[list[dict[str, Any] | None], list[str | None]]:
        """Each image's values by column, or None and why there are none."""
        try:
            with self.busy:
                result = self.encode(pixel_values, grid_thw, self.output)
        except MemoryError as error:
            if len(grid_thw) > 1:
                raise
            return [None], [str(error)]
        finite = np.logical_and.reduce([is_finite(rows, axis=1) for rows in result])
        infinite = non_finite_images(self.config, grid_thw, finite, self.output)
        ends = np.cumsum(output_rows(self.config, grid_thw, self.output))[:-1]
        images = list(zip(*(np.split(rows, ends) for rows in result), strict=True))
        values, errors = [], []
        for number, (rows, *features) in enumerate(images):
            bad = number in infinite
            errors.append(f"its {self.output} hold infinities or NaN in {self.dtype}" * bad or None)
            values.append(None if bad else self._values(rows, features))
        return values, errors

    def _values(self, rows: np.ndarray, features: list[np.ndarray]) -> dict[str, Any]:
        if self.output == "pooled":
            return {"pooled": rows[0].astype(np.float32)}
        values = {self.output: rows.astype(self.store).tobytes(), "shape": rows.shape}
        if features:
            values["deepstack"] = np.stack(features).astype(self.store).tobytes()
        return values

    def _report_call(self, grid_thw: np.ndarray, errors: list[str | None]) -> None:
        refused = sum(error is not None for error in errors)
        patches = int(grid_thw.prod(axis=1).sum())
        self.report(
            calls=1,
            images=len(errors) - refused,
            refused=refused,
            patches=patches,
            padding=choose_bucket(self.config, grid_thw, self.buckets).tokens - patches,
            busy=self.busy.taken(),
        )


def _raise_first(table: pa.Table, errors: list[str | None]) -> None:
    for row, error in enumerate(errors):
        if error is not None:
            name = table["id"][row].as_py() if "id" in table.column_names else f"row {row}"
            raise ImageError(f"{name}: {error}")


def output_columns(config: VisionConfig, output: str) -> pa.Schema:
    """What is added to each row: see `ray_data.encode`."""
    if output == "pooled":
        return pa.schema([("pooled", pa.list_(pa.float32(), config.hidden_size))])
    fields = [(output, pa.large_binary()), ("shape", pa.list_(pa.int64(), 2))]
    if output == "embeddings" and config.deepstack_visual_indexes:
        fields.append(("deepstack", pa.large_binary()))
    return pa.schema(fields)


def _append(table: pa.Table, columns: pa.Schema, values: list[dict[str, Any] | None]) -> pa.Table:
    for field in columns:
        column = [None if value is None else value[field.name] for value in values]
        table = table.append_column(field, pa.array(column, field.type))
    return table


class _Busy:
    """The seconds in which at least one thread is in a call."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.since = self.seconds = 0.0

    def __enter__(self) -> None:
        with self.lock:
            self._add()
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self._add()
            self.inside -= 1

    def _add(self) -> None:
        now = time.perf_counter()
        self.seconds += (now - self.since) * (self.inside > 0)
        self.since = now

    def taken(self) -> float:
        """Those since the last time that they were asked for."""
        with self.lock:
            seconds, self.seconds = self.seconds, 0.0
            return seconds
