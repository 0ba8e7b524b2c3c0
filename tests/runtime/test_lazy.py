"""Packages import their names on demand: what checkers read is there, and documented names that moved are found."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.compat.aliases import MODULES, NAMES

SOURCE = Path(__file__).parents[2] / "src"
PACKAGES = [
    ".".join(path.parent.relative_to(SOURCE).parts)
    for path in sorted(SOURCE.rglob("__init__.py"))
    if "lazy_exports(" in path.read_text()
]


def read(package):
    """What checkers read: the module and the name there of every name."""
    tree = ast.parse((SOURCE / package.replace(".", "/") / "__init__.py").read_text())
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    return {alias.asname or alias.name: (node.module, alias.name) for node in branch.body for alias in node.names}


@pytest.mark.parametrize("package", PACKAGES)
def test_checkers_read_what_is_there(package):
    homes = read(package)
    module = importlib.import_module(package)
    assert sorted(homes) == module.__all__
    assert set(homes) <= set(dir(module))
    for name, (home, inside) in homes.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), inside), name


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_hides_a_name_of_its_package(package):
    folder = SOURCE / package.replace(".", "/")
    modules = {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
    taken = {name for name, (home, _) in read(package).items() if name in modules and home != package}
    assert not taken


@pytest.mark.parametrize("old", MODULES)
def test_modules_are_found_where_they_are_documented(old):
    home, _, names = MODULES[old].partition(":")
    found, lives = importlib.import_module(old), importlib.import_module(home)
    if names:
        assert found.__all__ == names.split()
        assert all(getattr(found, name) is getattr(lives, name) for name in names.split())
    else:
        assert found is lives


@pytest.mark.parametrize("package", NAMES)
def test_names_are_found_where_they_are_documented(package):
    module = importlib.import_module(package)
    for home, names in NAMES[package].items():
        for name, _, today in (each.partition("=") for each in names.split()):
            assert getattr(module, name) is getattr(importlib.import_module(home), today or name)
            assert name in dir(module)


PROGRAM = """
import meshwright as mw
print(mw.store.entries.__name__)
import meshwright.booster.plugin, meshwright.compat.colossalai
print(meshwright.booster.plugin is meshwright.compat.colossalai, meshwright.booster.__spec__.name)
from meshwright.booster.checkpoint_io import save_lora
print(save_lora is meshwright.compat.colossalai.checkpoint_io.save_lora)
for name in ("nothing", "_nothing"):
    try:
        getattr(mw, name)
    except AttributeError as error:
        print(error)
try:
    import meshwright.booster.nothing
except ModuleNotFoundError as error:
    print(error)
"""


def test_modules_are_found_by_attribute_and_by_alias():
    printed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [
        "meshwright.store.entries",
        "True meshwright.compat.colossalai",
        "True",
        "module 'meshwright' has no attribute 'nothing'",
        "module 'meshwright' has no attribute '_nothing'",
        "No module named 'meshwright.booster.nothing'",
    ]
