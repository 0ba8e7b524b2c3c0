"""The house: a room imports only from rooms below it, and cost never imports torch."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"
FLOORS = [
    {"errors", "version"},
    {"runtime"},
    {"cost", "strategy"},
    {"comm"},
    {"optim", "loss", "lr_scheduler", "data", "inspect"},
    {"nn"},
    {"store"},
    {"methods"},
    {"planner"},
    {"training"},
    {"compat", "cli"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MAKERS = {f"torch.{name}" for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "eye")}
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path):
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            rooms = [alias.name for alias in node.names if node.module == "meshwright" and alias.name in FLOOR_OF]
            yield from (f"meshwright.{room}" for room in rooms) if rooms else (node.module,)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_from_below(path):
    here = room_of(path)
    for module in imports(path):
        parts = module.split(".")
        if parts[0] != "meshwright" or here in ("__init__", "__main__"):  # the package's face, over every room
            continue
        there = parts[1] if len(parts) > 1 else "version"
        if there != here:
            assert FLOOR_OF[there] < FLOOR_OF[here], f"{here} imports {there}"


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) == "cost"], ids=lambda path: path.name)
def test_cost_knows_nothing_of_torch(path):
    assert not any(module.split(".")[0] in ("torch", "numpy") for module in imports(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= 600


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_makes_tensors(path):
    """What is imported on demand may be imported in the middle of a pass over tensors without data."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
            assert not any(ast.unparse(call) in MAKERS for call in calls), ast.unparse(statement)
