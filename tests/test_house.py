"""The house: rooms import only from rooms below, without circles; files are whole mechanisms; words stand alone."""

import ast
import tomllib

from tests import house
from tests.house import FLOORS, SOURCE, room_of

FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MAKERS = {f"torch.{name}" for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "eye")}
FILES = house.files()
MOST_FILES = dict(zip(house.JOURNEYS, (41, 9, 36, 12), strict=True))


def imports(path):
    for node in house.nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            rooms = [alias.name for alias in node.names if node.module == "meshwright" and alias.name in FLOOR_OF]
            yield from (f"meshwright.{room}" for room in rooms) if rooms else (node.module,)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_a_room_imports_only_from_below():
    wrong = []
    for path in FILES:
        here = room_of(path)
        if here in ("__init__", "__main__"):  # the package's face, over every room
            continue
        for module in imports(path):
            parts = module.split(".")
            if parts[0] == "meshwright":
                there = parts[1] if len(parts) > 1 else "version"
                if there != here and FLOOR_OF[there] >= FLOOR_OF[here]:
                    wrong.append(f"{house.name_of(path)} imports {there}")
    assert not wrong


def test_cost_knows_nothing_of_torch():
    cost = [path for path in FILES if room_of(path) == "cost"]
    assert cost
    assert not [path for path in cost for module in imports(path) if module.split(".")[0] in ("torch", "numpy")]


def test_files_stay_readable():
    assert not [house.name_of(path) for path in FILES if house.num_lines(path) > 600]


def test_no_module_makes_tensors():
    """What is imported on demand may be imported in the middle of a pass over tensors without data."""
    made = []
    for path in FILES:
        for statement in house.tree_of(path).body:
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
                if any(ast.unparse(call) in MAKERS for call in calls):
                    made.append(f"{house.name_of(path)}: {ast.unparse(statement)}")
    assert not made


def test_modules_are_few_and_whole():
    assert len(FILES) <= 340  # 320; and snapshots, restarts, profiles, and the doors into other people's loops
    assert len(house.crumbs()) <= 15
    assert not house.basenames_used_often()


def test_rooms_are_few_and_nothing_lies_loose():
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py", "version.py"}
    assert {room_of(path) for path in FILES if path.parent != SOURCE} == set(FLOOR_OF) - {"errors", "version"}
    assert len(FLOOR_OF) <= 20
    assert len(FLOORS) <= 11


def test_no_module_imports_itself_by_way_of_others():
    assert not house.circles()


def test_the_planner_knows_no_method_by_name():
    assert not house.method_names_in_planner()


def test_first_lines_of_docstrings_stand_alone():
    assert not house.docstrings_that_hang()


def test_journeys_are_short_and_stand_in_the_manual():
    walked = house.journeys()
    assert {name: len(files) for name, files in walked.items() if len(files) > MOST_FILES[name]} == {}
    assert {name: set(files) for name, files in walked.items()} == {
        name: set(files) for name, files in house.journeys_on_page().items()
    }


def test_a_wheel_has_every_file_that_modules_read():
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    globs = project["tool"]["setuptools"]["package-data"]["meshwright"]
    packed = {path for glob in globs for path in SOURCE.glob(glob)}
    files = {path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == packed
