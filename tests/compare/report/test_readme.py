"""What a stranger reads first: the README's figures are generated, its links and its call work."""

import re
from pathlib import Path

import pytest

from compare.report import report

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
RESULTS = ROOT / "compare" / "results"
INTEGRATIONS = ROOT / "triton_kernels" / "integrations"
VLLM, PROPOSAL = INTEGRATIONS / "vllm.md", INTEGRATIONS / "vllm-proposal.md"
EMBEDDINGS = RESULTS / "notes" / "embeddings.md"  # whose text holds arithmetic
PAGES = sorted(
    [
        *(README, ROOT / "CONTRIBUTING.md", ROOT / "flax_models" / "README.md"),
        *(*RESULTS.rglob("*.md"), *INTEGRATIONS.glob("*.md")),
    ]
)
# Of each page with figures, the blocks that are generated.
BLOCKS = {
    README: ("summary", "results", "checks"),
    VLLM: ("vllm",),
    PROPOSAL: ("sizes", "attention", "vllm"),
}
every_page = pytest.mark.parametrize("page", BLOCKS, ids=lambda page: page.name)
# A figure of a measurement: a number and what it counts.
FIGURE = re.compile(r"\d[\d,.]*\s?(?:[x×%]|µs|us|ms|times|[GMT]i?B|TB/s|TFLOP/s|GHz|W)(?![\w])")
# Of rules and shapes, not of measurements.
NOT_MEASURED = {README: ("1.1 times",), VLLM: (), PROPOSAL: ()}


def text(page=README):
    return page.read_text(encoding="utf-8")


def written_by_hand(page):
    rest = text(page)
    for block in BLOCKS[page]:
        begin, end = report.markers(block)
        before, begun, inner = rest.partition(begin)
        _, ended, after = inner.partition(end)
        assert begun, f"{page.name} has no {begin}"
        assert ended, f"{page.name} has no {end} behind {begin}"
        rest = before + after
    return rest


@pytest.mark.parametrize("page", [*BLOCKS, EMBEDDINGS], ids=lambda page: page.name)
def test_a_page_shows_the_committed_results(page):
    renewed = report.renewed(page, RESULTS, RESULTS / report.REPORT)
    assert renewed == text(page), f"renew it: python -m compare report --readme {page}"


@every_page
def test_no_measured_figure_is_written_by_hand(page):
    rest = written_by_hand(page)
    for known in NOT_MEASURED[page]:
        assert known in rest, f"{known} need not be excused"
        rest = rest.replace(known, "")
    assert FIGURE.findall(rest) == []


@pytest.mark.parametrize("told", ["8.6x faster", "3.02 ms", "17 µs", "12 %", "1.2 times"])
def test_a_figure_is_seen(told):
    assert FIGURE.search(told)


@pytest.mark.parametrize("told", ["224x224", "4e-3", "Triton 3.6", "head_dim 80"])
def test_a_shape_or_version_is_no_figure(told):
    assert not FIGURE.search(told)


def test_the_readme_is_short():
    assert len(text().splitlines()) <= 180


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        place, _, anchor = target.partition("#")
        linked = page.parent / place if place else page
        assert linked.exists(), f"{page.name} links {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links {target}"


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_operations_example_runs():
    torch = pytest.importorskip("torch")
    examples = re.findall(r"```python\n(.*?)```", text(), re.DOTALL)
    (example,) = [e for e in examples if "fused_rope_attention_qkvpacked(" in e]
    names = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    exec(example.replace('"cuda"', f'"{device}"'), names)
    assert names["out"].shape == (576, 16, 80)
    assert names["out"].isfinite().all()
