"""The proposal's reproductions: as they are on a GPU, else small and on a CPU."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "triton_kernels" / "integrations" / "vllm-proposal.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
SMALLER = {'"cuda"': '"cpu"', "9216": "8", "blocked_autorange()": "timeit(1)"}


@pytest.mark.parametrize(
    ("index", "told"),
    [(0, "without_the_copy <"), (1, r"^1\d operators:( aten\S+)+$"), (2, "^3456 <")],
)
def test_a_reproduction_runs(process, capsys, index, told):
    assert len(EXAMPLES) == 3
    example = EXAMPLES[index]
    assert "triton_kernels" not in example
    if not torch.cuda.is_available():
        for wanted, small in SMALLER.items():
            example = example.replace(wanted, small)
    exec(example, {})
    assert re.search(told, capsys.readouterr().out, re.MULTILINE)
