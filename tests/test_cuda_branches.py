"""Every place where the package does other things on a GPU is run on the stand-in, or read and named in the manual."""

import re

import pytest

from tests import cuda_branches

PAGE = cuda_branches.ROOT / "docs" / "cuda.md"


def named():
    """The places in the manual's table: ``room/file.py``, and functions of it."""
    found = set()
    for row in PAGE.read_text().splitlines():
        files = re.findall(r"`([\w/]+\.py)`", row) if row.startswith("| `") else []
        if len(files) == 1:
            functions = re.findall(r"`([\w.<>]+)`", row.split("|")[1].replace(f"`{files[0]}`", ""))
            found |= {f"meshwright/{files[0]}:{function}" for function in functions}
    return found


def test_every_branch_for_gpus_is_run_on_the_stand_in_or_named_in_the_manual():
    there, run = cuda_branches.branches(), cuda_branches.recorded()
    assert run - there == set(), "gone from the package: python -m tests.cuda_branches --write"
    assert there - run - named() == set(), "run it on the stand-in, or name it in docs/cuda.md"
    assert named() - there == set(), "named in docs/cuda.md, and no branch"
    assert named() & run == set(), "named in docs/cuda.md, and run on the stand-in"


def test_a_branch_is_found(tmp_path, monkeypatch):
    (tmp_path / "meshwright").mkdir()
    (tmp_path / "meshwright" / "one.py").write_text(
        "def asks(x):\n    return x.device.type == 'cuda'\n"
        "class A:\n    def holds(self, x):\n        return x.is_cuda\n"
        "    def not_this(self):\n        return self.kind == 'a'\n"
        "def inside():\n    def closure(kind):\n        return kind != 'cpu'\n    return closure\n"
        "def there():\n    return torch.cuda.is_available()\n"
    )
    monkeypatch.setattr(cuda_branches, "SOURCE", tmp_path)
    found = {each.partition(":")[2] for each in cuda_branches.branches()}
    assert found == {"asks", "A.holds", "inside.closure", "there"}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_record_is_what_the_cases_come_to():
    assert cuda_branches.everything() & cuda_branches.branches() == cuda_branches.recorded()
