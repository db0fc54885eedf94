"""The reports: Markdown and charts from result files, for each device and for the README.

`write_report` writes <device>/report.md beside each device's files, and a summary of them all that
links these. `update_readme` renews what a README shows of it.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from compare.bench.fusion_table import cells_of, times_table, verdict_line
from compare.common import result_files
from compare.common.errors import InputError, UnavailableError
from compare.common.result_files import Results
from compare.report import embeddings, markdown, tables
from compare.report.grouping import RecordDict, families, layer_families
from compare.report.summary import (
    attention_table,
    hero_bars,
    summary_sentences,
    summary_table,
)
from compare.workloads.towers import TOWERS

REPORT = "report.md"  # its name in a directory of results, and in that of each device
PARTS = (
    "agreement",
    "stress",
    "kernels",
    "fusion",
    "embeddings",
    "invariance",
    "training",
    "towers",
    "integration",
    "vllm",
    "scale",
)
# Of a page.
_BLOCKS = (
    *("summary", "results", "checks", "attention", "sizes", "vllm"),
    *("embeddings", "write-ups"),
)
_FORMER_NAMES = {"stress": "trust"}  # of a part and its file
_HERO = "hero.svg"
_NOTES = "notes/README.md"  # what somebody wrote about the results beside it

_SPREAD = (
    "Spread: 90th - 10th percentile over the median; it and the error are the largest of a row."
)
_METHODS = {
    "kernels": "PyTorch's times are CUDA-graph replays, JAX's the profiler's sum of a call's "
    "kernels without the gaps between them. Inputs rotate past the L2 cache. Floor: the bytes that "
    "must move at the rate of a copy of 94 MiB, as many as the windows of 1344 px move, or the "
    "products at the matrix rate, whichever takes longer. In brackets: share of the floor, or the "
    f"speedup of ours of the same framework. {_SPREAD} PyTorch's samples are means over some 3 ms "
    "of replays, JAX's are single calls, which spread more. pallas / triton is by the profiler for "
    "both.",
    "fusion": "Of about 9,216 tokens in all, by head_dim and tokens of a segment, the fastest way "
    'in bold. Clocks as in the kernels\' tables. In the chart a ring marks where "qk" begins to '
    'take longer than "none", the grey line the longest segment for which "auto" takes it.',
    "embeddings": "One head; columns, segments and tokens as named. Clocks as in the kernels' "
    "tables, the embedding included; kernels' gaps count in PyTorch and not in JAX, so that Pallas "
    "is set against Triton by the profiler for both. Errors are judged before anything is timed: "
    "in fp32 no element may be off by more than 5e-5, and ours has to keep rule 1 of the "
    "kernels. Floor: bytes by tables, or products, in fp32 each as three in bf16. Ways: both "
    "embedded inside (qk), K beforehand (q), both beforehand (none), and what auto makes of it. "
    "Peers embed by torch.compile or XLA; SDPA is compiled with it, by the backend that PyTorch "
    "chooses. Shapes without a target leave out peers that do not take them.",
    "invariance": "Clocks, floor and brackets as in the kernels' tables; the error is that of "
    "either call. A batch-invariant call launches what its segments' own lengths ask for, so long "
    "ones never the warp-specialized kernel.",
    "training": "A call and its backward pass, the gradient in qkv as the result. Clocks and "
    "brackets as in the kernels' tables. Floor: the bytes and products of both passes, five of "
    "these in the backward one. The error is that of the gradient in q, k or v which is nearest to "
    "its limit. Memory: beside the inputs, the result included; in PyTorch the most that was "
    "allocated at once, in JAX what XLA has planned for the program. Of towers: a step's forward "
    "and backward pass and an update of all parameters by plain gradient descent, by the wall; the "
    "error is that of the gradient of the patch embedding's weights. Their memory is taken in the "
    "same two ways, weights included. Losses: of 50 steps of fine-tuning in bf16, weights kept in "
    "fp32. Their relative RMS distance from those of Hugging Face's fp32 tower may be 1.1 times "
    "that of its bf16 tower's.",
    "towers": "Random weights at the published sizes. Wall time of whole calls, inputs on the GPU, "
    "each waited for; of calls in a row only the last is. The first call of a size, which compiles "
    "and plans, stands by itself. Floor: all products at the matrix rate and the windows' bytes at "
    "the copy bandwidth. In brackets: share of the floor, or the speedup of ours of the same "
    f"framework. {_SPREAD}",
    "scale": "A folder of JPEG photographs of 0.3 to 2.8 megapixels, cut from two and scaled, all "
    "different, to vectors by `python -m flax_models encode --output pooled`: the time of one run "
    "from when the first tower is loaded, after a first run over 512 of them has compiled the "
    "programs. Rows begin with the run, our framework and GPUs. A tower alone gets the patches of "
    "128 photographs from the host's memory, in as many threads as the command's, the median of "
    "passes; "
    "on two GPUs two of them at once. Hugging Face's loop reads those 128, eight in a call of its "
    "processor and its tower. Errors are of the vectors of eight photographs as they came out, "
    "against the fp32 tower on the same patches. Stages: milliseconds of a core (decode, patches, "
    "writing) or of a GPU for a photograph, and their share of the sum; of the command upload and "
    "tower are those of the tower alone, in whose ratio decoding and patches divide what the run "
    "took for both. Cores: as many as would keep one run's towers at 90 % of what they reach "
    "alone.",
    "integration": "Weights, wall time of whole calls and floor as for the towers. "
    "`accelerate(model)` as it is, and with every block compiled by torch.compile. In brackets: "
    f"share of the floor, or the speedup of the accelerated tower. {_SPREAD}",
    "vllm": "Weights, wall time of whole calls and floor as for the towers. vLLM's tower as it "
    "comes, by its own settings (norms by its own kernels, a compiled encoder, CUDA graphs of the "
    "very size), and with the plugin, each called as vLLM's workers call it with normalised "
    "patches. In brackets: share of the floor, or the speedup of vLLM with the plugin. Best "
    f"setting: the fastest of each side by that clock. {_SPREAD}",
}
_ROTATIONS = 'In the chart "rope + ..." is the faster of the rotations before that attention.'
# What has to be known of one family alone.
_REMARKS = {
    "windows": _ROTATIONS,
    "frames": _ROTATIONS,
    "rotate": 'Pallas\' pass is timed within a call with `fuse="none"`, whose error stands here. '
    "A negation in place, where there is one, is PyTorch's, of as many bytes in one piece.",
}
_MODELS = {
    "tower": "Qwen2.5-VL 7B",
    "qwen2-tower": "Qwen2-VL 7B",
    "qwen3-tower": "Qwen3-VL 8B",
    "qwen3_5_tower": "Qwen3.5, 24 layers of 16 heads x 64",
    "qwen3_5_small_tower": "Qwen3.5, 12 layers of 12 heads x 64",
}
_TITLES = {
    "agreement": "Agreement",
    "stress": "Under stress",
    "kernels": "Kernels",
    "fusion": "How much of the rotation to fuse",
    "embeddings": "Rotated and added positions, over narrow and wide heads",
    "invariance": "What batch invariance costs",
    "training": "Forward and backward",
    "towers": "Towers",
    "windows": "Windowed attention, one layer, RoPE included",
    "frames": "Whole-frame attention, one layer, RoPE included",
    "windows_other": "Windowed attention, other shapes",
    "frames_other": "Whole-frame attention, other shapes",
    "rotate": "Rotation of Q and K as a pass of its own",
    **{family: f"Whole tower of {model}" for family, model in _MODELS.items()},
    "integration": "Hugging Face's tower, untouched and accelerated",
    "losses": "Losses of fine-tuning the first 8 layers' tower of Qwen2.5-VL 7B at 448 px",
    "vllm": "In vLLM",
    "scale": "A folder of photographs",
}
_INTEGRATED = {
    "integration": _MODELS["tower"],
    "integration_qwen3": _MODELS["qwen3-tower"],
    "integration_qwen3_5": _MODELS["qwen3_5_tower"],
}
_IN_VLLM = {
    "vllm": _MODELS["tower"],
    "vllm_qwen3": _MODELS["qwen3-tower"],
    "vllm_qwen2": _MODELS["qwen2-tower"],
}

_Parts = Mapping[str, Results]


class _Section(NamedTuple):
    """Of a part's report: without a title it is the part's only one, or begins it.

    `draw` draws its chart by the module `charts`, which needs Matplotlib, into a file.
    """

    text: str
    title: str = ""
    chart: str = ""
    draw: Callable[[ModuleType, Path], None] | None = None


def write_report(directory: Path, out: Path) -> Path:
    """Draw the charts and write a report beside each device's result files, and one of them all.

    Args:
        directory: holds a directory for each device, each with the parts' JSON files.
        out: the Markdown file to write with each device's summary; it is returned.

    Raises:
        InputError: no results there, one that cannot be read, or a place that cannot be written.
    """
    devices = read_devices(directory)
    result_files.check_writable(out)
    for folder, parts in devices.items():
        _draw(folder, parts)
        result_files.write_text(device_report(folder, parts), folder / REPORT)
    result_files.write_text(overview(devices, out.parent), out)
    return out


def overview(devices: Mapping[Path, _Parts], base: Path) -> str:
    """Each device's summary and a link to its report; `base` is the directory of this one."""
    lines = ["# Results"]
    for folder, parts in devices.items():
        link = f"[Everything measured on it]({_link(folder / REPORT, base)})"
        lines += [f"## {_device(parts)}", summary_table(parts), _checks([parts]), link]
    if (base / _NOTES).is_file():
        lines += ["## Notes", f"[What is reached, what is missed, and what was tried]({_NOTES})"]
    return "\n\n".join(filter(None, lines)) + "\n"


def device_report(folder: Path, parts: _Parts) -> str:
    """One device's report: all that was measured, with the charts that lie in its directory."""
    lines = [f"# Results of {_device(parts)}", summary_table(parts)]
    if (folder / _HERO).is_file():
        lines.append(f"![Towers' time]({_HERO})")
    for part, measured in parts.items():
        lines += [f"## {_title(part)}", markdown.measured_line(measured)]
        for section in _sections(measured):
            lines.append(section.title and f"### {section.title}")
            if section.chart and (folder / section.chart).is_file():
                lines.append(f"![{section.title or _title(part)}]({section.chart})")
            lines.append(section.text)
        if part != "stress" and (reasons := markdown.notes(measured)):
            lines.append("Without a number, and why:\n\n" + "\n".join(reasons))
    lines += ["## Software", markdown.software(parts)]
    return "\n\n".join(filter(None, lines)) + "\n"


def update_readme(readme: Path, directory: Path, report: Path) -> None:
    """Write a README as `renewed` gives it.

    Raises:
        InputError: besides, it cannot be written.
    """
    result_files.write_text(renewed(readme, directory, report), readme)


def read_readme(readme: Path) -> str:
    """A README whose results can be renewed.

    Raises:
        InputError: it cannot be read, or lacks the markers of every block.
    """
    try:
        text = readme.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read {readme}: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not any(end in text.partition(begin)[2] for begin, end in map(markers, _BLOCKS)):
        begin, end = markers("results")
        raise InputError(f"{readme} has no {begin} followed by {end}")
    return text


def markers(block: str) -> tuple[str, str]:
    """What stands before and behind a block of a README that is generated."""
    return f"<!-- {block}:begin -->", f"<!-- {block}:end -->"


def renewed(readme: Path, directory: Path, report: Path) -> str:
    """A README's text with each of the blocks that it has renewed.

    `summary` is the hero chart and the table, `results` the sentences, a chart and links,
    `attention` the table's rows of it; all of the device with the most timings. `checks` is the
    outcome of the newest agreement and stress, whatever device they ran on. `vllm` is what was
    measured in vLLM on the first that has it, `sizes` of what; `embeddings` likewise what is
    reached of the targets of that part, `write-ups` beside whom.

    Args:
        readme: where the text stands as it was.
        directory: as of `write_report`.
        report: what that wrote, to link it.

    Raises:
        InputError: the README cannot be read or lacks the markers of every block, or there are no
            results, or one cannot be read.
    """
    text = read_readme(readme)
    devices = read_devices(directory)
    folder, parts = next(iter(devices.items()))

    def chart(title: str, name: str) -> str:
        path = folder / name
        return f"![{title}]({_link(path, readme.parent)})" if path.is_file() else ""

    training = next((of["training"] for of in devices.values() if "training" in of), None)
    own, others = (_link(path, readme.parent) for path in (folder / REPORT, report))
    links = f"[Everything measured on the {_device(parts)}]({own}); [all devices]({others})."
    blocks = {
        "summary": (chart("Towers' time beside Hugging Face's", _HERO), summary_table(parts)),
        "results": (summary_sentences(parts, training), chart(_title("tower"), "tower.svg"), links),
        "checks": (_checks(devices.values()),),
        "attention": (attention_table(parts),),
        "sizes": (tables.sizes_table(),),
        "vllm": tuple(_in_vllm(devices)),
        "embeddings": tuple(_of_embeddings(devices, embeddings.targets)),
        "write-ups": tuple(_of_embeddings(devices, embeddings.write_ups_table)),
    }
    for name, lines in blocks.items():
        begin, end = markers(name)
        block = "\n".join([begin, "\n\n".join(filter(None, lines)), end])
        text = re.sub(f"{begin}.*?{end}", lambda _, block=block: block, text, count=1, flags=re.S)
    return text


def _in_vllm(devices: Mapping[Path, _Parts]) -> Iterator[str]:
    measured = next((parts["vllm"] for parts in devices.values() if "vllm" in parts), None)
    if measured is None:
        yield "No run of `python -m compare vllm` is on record yet."
        return
    vllm = measured.versions.get("vllm", "of an unknown version")
    yield f"{measured.device}, vLLM {vllm}, bf16, random weights, {measured.dates}."
    for family, workloads in families(measured).items():
        yield f"{_IN_VLLM.get(family, family)}:"
        yield tables.vllm_table(measured, workloads)


def _of_embeddings(
    devices: Mapping[Path, _Parts], show: Callable[[embeddings.Cells], str]
) -> Iterator[str]:
    measured = next((p["embeddings"] for p in devices.values() if "embeddings" in p), None)
    if measured is None:
        yield "No run of `python -m compare embeddings` is on record yet."
        return
    yield f"{measured.device}, {measured.dates}."
    yield show(embeddings.cells_of(measured))


def _checks(devices: Iterable[_Parts]) -> str:
    """Of each part the newest, as code that was checked long ago is another."""
    devices, lines = list(devices), []
    for part, line in (("agreement", tables.agreement_line), ("stress", tables.stress_line)):
        if found := [parts[part] for parts in devices if part in parts]:
            newest = max(found, key=lambda measured: measured.date)
            lines.append(f"- {_title(part)}, {newest.device}: {line(newest)}")
    return "\n".join(lines)


def read_devices(directory: Path) -> dict[Path, dict[str, Results]]:
    """The result files by device directory and part, the device with the most timings of kernels
    and towers first; of devices with as many, the one that was measured last.

    Raises:
        InputError: there is none, or one cannot be read.
    """
    found: dict[Path, dict[str, Results]] = {}
    for folder in sorted(path for path in directory.glob("*") if path.is_dir()):
        parts = {part: measured for part in PARTS if (measured := _read_part(folder, part))}
        for part, measured in parts.items():
            if measured.device != _device(parts):
                raise InputError(
                    f"{folder / part}.json is of {measured.device}, but others in its folder are "
                    f"of {_device(parts)}: a folder holds one device's results"
                )
        if parts:
            found[folder] = parts
    if not found:
        names = ", ".join(f"{part}.json" for part in PARTS)
        raise InputError(f"no results in {directory}: expected <device>/ with {names}")
    return dict(sorted(found.items(), key=lambda item: _weight(item[1]), reverse=True))


def _read_part(folder: Path, part: str) -> Results | None:
    """A part's results, also from a file of its former name; None where there is none."""
    names = [part, _FORMER_NAMES.get(part, part)]
    for path in (folder / f"{name}.json" for name in names):
        if path.is_file():
            measured = result_files.read(path)
            if measured.part not in names:
                raise InputError(f"{path} holds results of {measured.part}, not of {part}")
            return replace(measured, part=part)
    return None


def _weight(parts: _Parts) -> tuple[int, str]:
    """Of a device: how many timings there are of what is shown first, and its newest date."""
    counted = (parts[part] for part in ("kernels", "towers") if part in parts)
    records = (record for measured in counted for record in measured.records)
    timings = sum(record["median_us"] is not None for record in records)
    return timings, max(measured.date for measured in parts.values())


def _device(parts: _Parts) -> str:
    return next(iter(parts.values())).device


def _link(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()


def _sections(measured: Results) -> list[_Section]:
    if measured.part == "agreement":
        layers = [_layers(*of_family) for of_family in layer_families(measured).items()]
        return [_Section(tables.agreement_line(measured)), *layers]
    if measured.part == "stress":
        return [_Section(tables.stress_table(measured))]
    if measured.part == "scale":
        return [_Section("\n\n".join([*tables.scale_tables(measured), _METHODS["scale"]]))]
    if measured.part == "fusion":
        return [_fusion(measured)]
    if measured.part == "embeddings":
        return list(_embeddings(measured))
    timings = [_timings(measured, *of_family) for of_family in families(measured).items()]
    return [_Section(_METHODS[measured.part]), *timings]


def _layers(family: str, records: Sequence[RecordDict]) -> _Section:
    title = _title(family)
    depth = 1 + max(record["layer"] for record in records if record.get("layer") is not None)
    if depth < TOWERS[family].depth:  # as where there is no GPU
        title = f"Small tower of {depth} layers, built as that of {_MODELS[family]}"
    return _Section(
        tables.layer_table(records),
        f"{title}, layer by layer",
        f"{family}-layers.svg",
        lambda charts, path: charts.layer_chart(records, title, path),
    )


def _fusion(measured: Results) -> _Section:
    cells = cells_of(measured.records)
    table = markdown.table(*times_table(cells, best="**{}**"))
    return _Section(
        "\n\n".join([verdict_line(cells), table, _METHODS["fusion"]]),
        chart="fusion.svg",
        draw=lambda charts, path: charts.fusion_chart(cells, path),
    )


def _embeddings(measured: Results) -> Iterator[_Section]:
    cells = embeddings.cells_of(measured)
    yield _Section(
        "\n\n".join([embeddings.targets(cells), _METHODS["embeddings"]]),
        chart="embeddings.svg",
        draw=lambda charts, path: charts.embeddings_chart(cells, path),
    )
    for (embedding, precision), alike in embeddings.families(cells).items():
        tables_ = [embeddings.ways_table(alike), embeddings.peers_table(alike)]
        title = f"{embeddings.EMBEDDINGS.get(embedding, embedding)} in {precision}"
        yield _Section("\n\n".join(filter(None, tables_)), title[0].upper() + title[1:])


def _timings(measured: Results, family: str, workloads: Sequence[str]) -> _Section:
    title = _title(family)
    if losses := [r for name in workloads for r in measured.of(name) if "losses" in r]:
        return _Section(tables.loss_table(losses), title)
    if family in _INTEGRATED:
        title = f"Hugging Face's tower of {_INTEGRATED[family]}"
    if family in _IN_VLLM:
        title = f"vLLM's tower of {_IN_VLLM[family]}"
    times = tables.timing_tables(measured, workloads)
    if measured.part == "invariance":  # the family's remarks and chart are those of the kernels
        return _Section("\n\n".join(times), title)
    remarks = [_REMARKS[family]] if family in _REMARKS else []
    of_chart, chart = title, f"{family}.svg"
    if measured.part == "training":  # of the families of kernels and towers
        remarks, of_chart = [], f"{of_chart}, forward and backward"
        chart = f"training-{chart}"
    return _Section(
        "\n\n".join([*times, *remarks]),
        title,
        chart,
        lambda charts, path: charts.timing_chart(measured, workloads, of_chart, path),
    )


def _draw(folder: Path, parts: _Parts) -> None:
    try:
        from compare.report import charts
    except ImportError:
        raise UnavailableError(
            "charts need Matplotlib: pip install '.[compare]' in the clone"
        ) from None
    charts.hero_chart(hero_bars(parts), _device(parts), folder / _HERO)
    for section in (section for measured in parts.values() for section in _sections(measured)):
        if section.draw:
            section.draw(charts, folder / section.chart)


def _title(name: str) -> str:
    return _TITLES.get(name, name)
