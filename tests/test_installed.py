"""The README's recipe in an empty environment, as ``make dist`` follows it; nothing of it without network."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import installed


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_recipe_of_the_readme_works_from_a_wheel(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(installed.ROOT)]
    reachable = subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", str(tmp_path / "try"), "wandb"])
    if reachable.returncode or subprocess.run(wheel).returncode:
        pytest.skip("pip reaches no index, or cannot build wheels")
    installed.main(next(tmp_path.glob("*.whl")))
