"""The table and the sentences at the top of a README, of what is on record and what is not."""

from compare.common.result_files import Record
from compare.report.summary import hero_bars, summary_sentences, summary_table
from tests.compare import synthetic


def test_a_summary_tells_a_little_faster_from_a_little_slower_and_leaves_out_what_is_unknown():
    records = [
        Record("frames-1344", "triton", median_us=930.0, framework="torch"),
        Record("frames-1344", "in-place rope + FA3 varlen", median_us=887.0, framework="torch"),
        Record("tower-448", "torch", median_us=3e3, row_us=3e3, framework="torch"),
        Record("tower-448", "Hugging Face SDPA", median_us=6e3, row_us=6e3, framework="torch"),
    ]
    parts = {name: synthetic.as_results(name, records) for name in ("towers", "kernels")}
    text = summary_table(parts)
    assert "| 0.95x / – |\n" in f"{text}\n"
    assert "| 2.0x / – |" in text
    assert "flash attention" not in text
    assert "kernels alone" not in text


def test_a_summary_of_results_that_are_missing():
    record = Record("windows-448", "triton", median_us=5.0, framework="torch")
    lines = summary_table({"kernels": synthetic.as_results("kernels", [record])}).splitlines()
    assert lines[2].endswith("| **5 / –** | **– / –** | **– / –** | **– / –** |")
    assert len(lines) == 3


def test_sentences_tell_the_least_speedup_of_any_size():
    """Which of both frameworks it is of, or which size, does not matter for a tower."""
    times = {"448": (1.0, 1.1, 8.0), "672": (2.0, 2.5, 9.0)}  # ms of ours and of the others
    towers = [
        Record(f"tower-{size}", name, median_us=1e3 * ms, row_us=1e3 * ms, framework=framework)
        for size, (torch, flax, other) in times.items()
        for name, framework, ms in (
            ("torch", "torch", torch),
            ("flax", "jax", flax),
            ("Hugging Face SDPA", "torch", other),
            ("Hugging Face FA2 varlen", "torch", other / 2),
        )
    ]
    kernels = [
        Record("windows-448", name, median_us=us, framework=framework)
        for name, framework, us in (
            ("triton", "torch", 5.0),
            ("in-place rope + FA2 varlen", "torch", 9.0),
            ("in-place rope + FA3 varlen", "torch", 8.5),
        )
    ]
    parts = {"towers": synthetic.as_results("towers", towers)}
    assert summary_sentences(parts).splitlines() == [
        "- **Towers**: the speedup over Hugging Face's is at least 3.6x with SDPA, its default, "
        "and at least 1.80x with flash attention."
    ]
    assert hero_bars(parts) == {}  # at two of the sizes nothing is on record
    parts["kernels"] = synthetic.as_results("kernels", kernels)
    assert "windows" not in summary_sentences(parts)  # JAX has no time


def test_the_bars_of_the_hero_chart():
    records = synthetic.timing_records(("tower",), synthetic.TOWERS)
    bars = hero_bars({"towers": synthetic.as_results("towers", records)})
    assert list(bars)[:2] == ["ours, PyTorch", "ours, Flax"]
    first = {name: round(times_ms[0], 2) for name, times_ms in bars.items()}
    assert first == {
        "ours, PyTorch": 2.48,
        "ours, Flax": 2.64,
        "Hugging Face, flash attention": 13.6,
        "Hugging Face, SDPA": 24.8,
    }


def test_a_sentence_on_training_names_its_device():
    times_us = {
        ("triton", "torch"): (10.0, 10.0),
        ("rope + FA2 varlen", "torch"): (25.0, 15.0),
        ("pallas", "jax"): (8.0, 8.0),
        ("XLA rope + cuDNN", "jax"): (16.0, 9.6),
    }
    kernels = [
        Record(f"{family}-448", name, median_us=us, framework=framework)
        for (name, framework), of_family in times_us.items()
        for family, us in zip(("windows", "frames"), of_family, strict=True)
    ]
    training = synthetic.as_results("training", kernels)
    assert summary_sentences({}, training) == (
        f"- **Training** ({training.device}, forward and backward): the speedup over the fastest "
        "library, which rotates beforehand, is at least 2.5x in PyTorch and 2.0x in JAX in windows,"
        " 1.50x and 1.20x over whole images."
    )


def test_a_sentence_on_steps_of_training():
    steps = [
        Record("tower-train-448", name, median_us=1e3 * ms, row_us=1e3 * ms, framework="torch")
        for name, ms in (("accelerated", 10), ("Hugging Face SDPA", 31), ("Hugging Face FA2", 16))
    ]
    assert summary_sentences({}, synthetic.as_results("training", steps[:2])) == ""
    assert summary_sentences({}, synthetic.as_results("training", steps)) == (
        "- **A step of training** all layers of an accelerated model: the speedup is at least 3.1x "
        "over SDPA, and 1.60x over flash attention."
    )
