"""The README's code runs as it stands, its model smaller."""

import contextlib
import functools
import io
import re
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]


def run_blocks():
    sys.path.insert(0, str(ROOT / "examples" / "gpt2"))
    names = {}
    output = io.StringIO()
    try:
        import gpt2

        small = functools.partial(gpt2.GPT2, dim=32, num_layers=2, num_heads=2)
        with contextlib.redirect_stdout(output), mock.patch.object(gpt2, "GPT2", small):
            for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
                exec(block, names)
    finally:
        sys.path.remove(str(ROOT / "examples" / "gpt2"))
    return output.getvalue()


def test_the_code_of_the_readme_runs(ranks):
    first, second = ranks(2).run(run_blocks)
    assert "fsdp + checkpoint + amp_native(dtype='bf16')" in first
    assert len(first.splitlines()) > len(second.splitlines()) > 0
