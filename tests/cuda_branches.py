"""Where the package does other things on a GPU than on a CPU, and which of these places tests run on the stand-in.

``python -m tests.cuda_branches`` lists them; ``--write`` runs the stand-in's cases and writes down what they came to. A
test compares the record with the code: a branch for GPUs is either run on the stand-in or named in ``docs/cuda.md``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
RECORD = Path(__file__).with_suffix(".txt")
_KINDS = {"cuda", "cpu"}
_WORDS = {"type", "is_cuda", "kind", "device_type"}
_FEATURES = {"is_available", "is_initialized"}  # of torch.cuda


class _Finder(ast.NodeVisitor):
    """Collect functions that ask for the kind of a device."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.found: set[str] = set()

    def _enter(self, node: Any) -> None:
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _enter

    def _note(self) -> None:
        self.found.add(".".join(self.names) or "<module>")

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        constants = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
        attributes = {each.attr for side in sides for each in ast.walk(side) if isinstance(each, ast.Attribute)}
        names = {each.id for side in sides for each in ast.walk(side) if isinstance(each, ast.Name)}
        if constants & _KINDS and (attributes | names) & _WORDS:
            self._note()
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        of_cuda = isinstance(node.value, ast.Attribute) and node.value.attr == "cuda" and node.attr in _FEATURES
        if node.attr == "is_cuda" or of_cuda:
            self._note()
        self.generic_visit(node)


def branches() -> set[str]:
    """``meshwright/optim/x.py:Class.function`` of every place that asks for the kind of a device."""
    found = set()
    for file in sorted((SOURCE / "meshwright").rglob("*.py")):
        finder = _Finder()
        finder.visit(ast.parse(file.read_text()))
        found |= {f"{file.relative_to(SOURCE)}:{name}" for name in finder.found}
    return found


def _place(frame: FrameType) -> str | None:
    name = frame.f_code.co_filename
    if not name.startswith(str(SOURCE)):
        return None
    return f"{Path(name).relative_to(SOURCE)}:{frame.f_code.co_qualname.replace('.<locals>', '')}"


@contextlib.contextmanager
def noted() -> Iterator[set[str]]:
    """Note which functions of the package are called inside."""
    found: set[Any] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code not in found:
            found.add(frame.f_code)
            found.add(_place(frame))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        found.intersection_update({each for each in found if isinstance(each, str)})


def recorded() -> set[str]:
    """What ``--write`` has written."""
    return set(RECORD.read_text().split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="run the cases, and write the record")
    if parser.parse_args().write:
        from tests.cuda_branch_runs import everything

        RECORD.write_text("\n".join(sorted(everything() & branches())) + "\n")
    known = recorded() if RECORD.exists() else set()
    for each in sorted(branches()):
        print("stand-in" if each in known else "        ", each)


if __name__ == "__main__":
    main()
