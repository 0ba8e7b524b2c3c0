"""Where the package does other things on a GPU than on a CPU, and which of these places tests run on the stand-in.

``python -m tests.cuda_branches`` lists them; ``--write`` runs the stand-in's cases and writes down what they came to. A
test compares the record with the code: a branch for GPUs is either run on the stand-in or named in ``docs/cuda.md``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import sys
import tempfile
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


# --- The cases that the stand-in plays: those of the tests of waits, and those of ``make gpu``


def train(methods: list[str], ports: tuple[int, int]) -> set[str]:
    """Train with methods, one after the other, on these ranks."""
    from tests.methods.pair_runs import Case
    from tests.training.test_host_reads import train_and_count

    with noted() as found:
        train_and_count([Case((method,)) for method in methods], ports)
    return found


def update(ports: tuple[int, int]) -> set[str]:
    """Train with every optimizer, and through a manager."""
    from tests.training.test_host_reads import OPTIMIZERS, managed_steps, optimizers_and_counts

    with noted() as found:
        managed_steps(ports)
        optimizers_and_counts(list(OPTIMIZERS), ports)
    return found


def check(folder: str) -> set[str]:
    """Run the cases of ``make gpu`` that need one rank."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu.worker import Session

    from gpu import checks, figures

    session = Session(Path(folder) / "lines", True)
    with noted() as found:
        for function in (checks.decisions, checks.attention, checks.fp8_kernels, checks.offload, checks.checkpoint):
            function(session)
        for variant in ("raw_fsdp2", "fsdp", "fp8", "offload"):
            figures.llama(session, "1B", variant)
    return found


def everything(methods: list[str] | None = None) -> set[str]:
    """The functions that all cases come to, or those with a few methods alone."""
    from tests import cuda_branches as this  # by its name, for other processes
    from tests.methods.pair_runs import ROWS
    from tests.pool import Pool, free_port

    found: set[str] = set()
    two = Pool(2, timeout_s=600.0)
    for method in methods or ROWS:
        found = found.union(*two.run(this.train, [method], (free_port(), free_port())))
        print(method, len(found), flush=True)
    two.stop()
    if methods is None:
        one = Pool(1, timeout_s=600.0)
        found |= one.run(this.update, (free_port(), free_port()))[0]
        one.stop()
        with tempfile.TemporaryDirectory() as folder:
            found |= check(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="run the cases, and write the record")
    if parser.parse_args().write:
        RECORD.write_text("\n".join(sorted(everything() & branches())) + "\n")
    known = recorded() if RECORD.exists() else set()
    for each in sorted(branches()):
        print("stand-in" if each in known else "        ", each)


if __name__ == "__main__":
    main()
