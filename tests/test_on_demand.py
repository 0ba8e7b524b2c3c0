"""Names of packages that are imported on demand: what checkers read, what is listed and what is there are the same."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGES = [
    ".".join(path.parent.relative_to(SOURCE).parts)
    for path in sorted(SOURCE.rglob("__init__.py"))
    if "on_demand(" in path.read_text()
]


def told(package):
    """What checkers read, what ``on_demand`` is told, and what is listed."""
    tree = ast.parse((SOURCE / package.replace(".", "/") / "__init__.py").read_text())
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    read = {}
    for node in branch.body:
        for alias in node.names:
            name = f"{package}.{alias.name}" if node.module == package else node.module
            read[alias.name] = name
    (given,) = (node.value.args[1].value for node in branch.orelse)
    lines = (line.split(":") for line in given.split("\n") if line.strip())
    homes = {name: f"{package}.{module.strip()}" for module, names in lines for name in names.split()}
    modules = {name: home for name, home in read.items() if home == f"{package}.{name}" and name not in homes}
    listed = next(ast.literal_eval(node.value) for node in tree.body
                  if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")  # fmt: skip
    return read, homes, modules, listed


@pytest.mark.parametrize("package", PACKAGES)
def test_checkers_read_what_is_there(package):
    read, homes, modules, listed = told(package)
    assert read == homes | modules
    assert sorted(read) == sorted(listed)
    module = importlib.import_module(package)
    assert set(listed) <= set(dir(module))
    assert all(getattr(module, name) is getattr(importlib.import_module(home), name) for name, home in homes.items())
    assert all(getattr(module, name) is importlib.import_module(home) for name, home in modules.items())


PROGRAM = """
import meshwright.cost.memory, meshwright.cost as cost, meshwright as mw
from meshwright.cost import memory
print(memory.__module__, cost.memory is memory, mw.store.entries.__name__)
for name in ("nothing", "_nothing"):
    try:
        getattr(mw, name)
    except AttributeError as error:
        print(error)
"""


def test_names_of_modules_stay_functions_and_modules_are_found():
    printed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [
        "meshwright.cost.memory True meshwright.store.entries",
        "module 'meshwright' has no attribute 'nothing'",
        "module 'meshwright' has no attribute '_nothing'",
    ]
