"""The figures of the house, as ``tests/test_house.py`` holds them.

    python -m tests.house            print them
    python -m tests.house --all      with the files and lines behind each
    python -m tests.house --json     as JSON
    python -m tests.house --write    write the four journeys into docs/architecture.md

All are read from the source, but for the journeys: they are counted in a real run on two ranks.
"""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import json
import os
import re
import statistics
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshwright"
PAGE = ROOT / "docs" / "architecture.md"
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
    {"compat", "cli", "integrations"},
]
INTERNALS = "runtime/torch_internals/"
# Names with an underscore that are of Python, of transformers and of Lightning.
NOT_OF_TORCH = {
    "_replace", "_exit", "_current_frames", "_lru_cache_wrapper", "_attn_implementation", "_model_mapping",
    "_grouped_linear", "_apply_gate", "_set_signature_columns_if_needed", "_get_dataloader",
    "_get_eval_sampler", "_layer_sync", "_results", "_wrap_closure",
}  # fmt: skip
JOURNEYS = ("accelerate(fsdp) to the first step", "one step", "a peak predicted", "a checkpoint saved")
_BEGIN, _END = "<!-- journeys -->", "<!-- end of journeys -->"
# A first line that begins so hangs on the name above it.
CANNOT_STAND_ALONE = re.compile(
    r"(Of|What|Whether|How|Where|Those|By|As|For|Until|That|Which|Who|So|Than|Around|In|On|With|Without|From|To|Into|"
    r"Over|Per|After|Before|Between|Beside|Behind|Also|Because|Then|Unless|Why|Its|Their|And|Or|But)\b"
)


@functools.cache
def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def module_of(path: Path) -> str:
    parts = ("meshwright", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@functools.cache
def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@functools.cache
def modules_imported() -> dict[str, set[str]]:
    """The modules of the package that each imports, names of packages followed to where they live."""
    known = {module_of(path): path for path in files()}
    exports = {}
    for module, path in known.items():
        if path.name == "__init__.py":
            for node in nodes_of(path):
                if isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        exports[module, alias.asname or alias.name] = (node.module, alias.name)

    def home(module: str, name: str) -> str:
        seen = set()
        while (module, name) in exports and (module, name) not in seen:
            seen.add((module, name))
            module, name = exports[module, name]
        return f"{module}.{name}" if f"{module}.{name}" in known else module

    found: dict[str, set[str]] = {}
    for module, path in known.items():
        if path.name == "__init__.py":
            continue
        names = found.setdefault(module, set())
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "meshwright":
                names |= {home(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "meshwright"}
        names.discard(module)
    return found


def circles() -> list[list[str]]:
    """Modules that import each other in a circle, imports in functions and under TYPE_CHECKING included."""
    edges = modules_imported()
    number, low, stack, found = {}, {}, [], []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in edges.get(module, ()):
            if other not in number:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == number[module]:
            members = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(members) > 1:
                found.append(sorted(members))

    sys.setrecursionlimit(10_000)
    for module in edges:
        if module not in number:
            visit(module)
    return found


def crumbs() -> list[str]:
    """Modules with one importer and at most 90 lines."""
    importers = collections.Counter(other for names in modules_imported().values() for other in names)
    return [
        name_of(path)
        for path in files()
        if path.name != "__init__.py" and num_lines(path) <= 90 and importers[module_of(path)] == 1
    ]


@functools.cache
def torch_internals() -> dict[str, list[str]]:
    """Names with an underscore that each file takes from torch.

    What is imported from torch, and private attributes that nothing in the package defines, so that they must be
    another's.
    """
    trees = {path: nodes_of(path) for path in files()}
    ours = set(NOT_OF_TORCH)
    for nodes in trees.values():
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                ours.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                ours.add(node.attr) if ast.unparse(node.value) in ("self", "cls") else None
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and "_ATTRIBUTE" in ast.unparse(node):
                ours |= {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    found = {}
    for path, nodes in trees.items():
        names = set()
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "torchao"):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                names |= {each for each in whole if _private(each)}
            elif isinstance(node, ast.Import):
                names |= {each.name for each in node.names if each.name.startswith("torch.") and _private(each.name)}
            elif isinstance(node, ast.Attribute) and _private(node.attr) and node.attr not in ours:
                names.add(ast.unparse(node))
        if names:
            found[name_of(path)] = sorted(names)
    return found


def _private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def method_names_in_planner() -> list[str]:
    """Text in the planner that is a method's name, docstrings left out."""
    methods = _announced()
    found = []
    for path in files():
        if room_of(path) != "planner":
            continue
        nodes = nodes_of(path)
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
        found += [
            f"{name_of(path)}:{node.lineno} {node.value}"
            for node in nodes
            if isinstance(node, ast.Constant) and node.value in methods and id(node) not in docs
        ]
    return found


def _announced() -> set[str]:
    for node in tree_of(SOURCE / "methods" / "__init__.py").body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES":
            return set(ast.literal_eval(node.value))
    raise ValueError("methods/__init__.py has no _HOMES")


def docstrings_that_hang() -> list[str]:
    """Docstrings whose first line cannot stand alone."""
    found = []
    for path in files():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if CANNOT_STAND_ALONE.match(text):
                    line = getattr(node, "lineno", 1)
                    found.append(f"{name_of(path)}:{line} {text.splitlines()[0]}")
    return found


def basenames_used_often() -> dict[str, int]:
    counts = collections.Counter(path.name for path in files() if path.name != "__init__.py")
    return {name: count for name, count in counts.items() if count > 3}


def comment_share() -> float:
    """Lines of comments per line of code."""
    comments = code = 0
    for path in files():
        for line in path.read_text().splitlines():
            text = line.strip()
            comments += text.startswith("#")
            code += bool(text) and not text.startswith("#")
    return comments / code


class _Footprints:
    """Notes the files of the package whose functions run; imports leave none."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}

    def __enter__(self) -> dict[str, None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self.files

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)) and code.co_flags & inspect.CO_OPTIMIZED:
            self.files.setdefault(code.co_filename.removeprefix(f"{SOURCE}{os.sep}"))


def walk_journeys(folder: str) -> dict[str, list[str]]:
    """Run the four journeys on this rank, each a second time, when everything is imported. Collective."""
    import torch

    import meshwright as mw
    from meshwright.store import CheckpointStore, TrainingState
    from tests import tiny

    def prepared():
        job = mw.accelerate(
            tiny.build("plain"), torch.optim.AdamW, tiny.Tokens(), tiny.loss_func,
            strategy=["fsdp"], dataloader_args={"batch_size": 8},
        )  # fmt: skip
        batches = iter(job.dataloader)
        job.step(next(batches))
        return job, batches

    def peak():
        batch = torch.zeros(4, tiny.SEQ_LEN, dtype=torch.long)
        return mw.plan(
            tiny.build("plain"), "h100x8", global_batch=16, strategy=["fsdp"], sample_batch=batch,
            loss_func=tiny.loss_func,
        )[0].needed_bytes  # fmt: skip

    walked = {}
    job, batches = prepared()
    job.step(next(batches))
    with _Footprints() as walked[JOURNEYS[0]]:
        job, batches = prepared()
    with _Footprints() as walked[JOURNEYS[1]]:
        job.step(next(batches))
    peak()
    with _Footprints() as walked[JOURNEYS[2]]:
        peak()
    store = CheckpointStore(Path(folder))
    state = TrainingState(job.model, job.optim, job.lr_scheduler, strategy="{}", step=2)
    store.save(state)
    state.step = 3
    with _Footprints() as walked[JOURNEYS[3]]:
        store.save(state)
    return {name: list(found) for name, found in walked.items()}


def journeys() -> dict[str, list[str]]:
    """The files of the package that rank 0 passes, in the order in which it comes to them."""
    from tests.pool import Pool

    pool = Pool(2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return pool.run(walk_journeys, folder)[0]
    finally:
        pool.stop()


def figures() -> dict[str, object]:
    lines = [num_lines(path) for path in files() if path.name != "__init__.py"]
    internals = {name: names for name, names in torch_internals().items() if not name.startswith(INTERNALS)}
    return {
        "modules": len(files()),
        "median lines": statistics.median(lines),
        "most lines": max(lines),
        "lines of the package": sum(num_lines(path) for path in files()),
        "loose files at the root": len(list(SOURCE.glob("*.py"))),
        "rooms": len({room_of(path) for path in files() if path.parent != SOURCE}),
        "floors": len(FLOORS),
        "modules with one importer and at most 90 lines": crumbs(),
        "circles": circles(),
        "files that name a torch internal elsewhere": internals,
        "method names in planner/": method_names_in_planner(),
        "docstrings whose first line cannot stand alone": docstrings_that_hang(),
        "basenames used more than three times": basenames_used_often(),
        "comments per line of code": round(comment_share(), 3),
    }


def journeys_on_page() -> dict[str, list[str]]:
    """The journeys as the manual shows them."""
    section = PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]
    parts = re.split(r"^### (.+)$", section, flags=re.MULTILINE)[1:]
    titles = {_title(name): name for name in JOURNEYS}
    return {
        titles[title]: re.findall(r"`([\w/]+\.py)`", text) for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def write_journeys() -> None:
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    parts = [f"{before}{_BEGIN}\n"]
    for name, passed in journeys().items():
        parts.append(f"\n### {_title(name)}\n\n{len(passed)} files: {' · '.join(f'`{file}`' for file in passed)}\n")
    PAGE.write_text("".join([*parts, f"\n{_END}", rest.partition(_END)[2]]))


def _title(name: str) -> str:
    return name[0].upper() + name[1:]


def main() -> None:
    if "--write" in sys.argv:
        write_journeys()
        return
    found = figures() | {f"files passed: {name}": passed for name, passed in journeys().items()}
    if "--json" in sys.argv:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name}: {len(value) if isinstance(value, list | dict) else value}")
        if "--all" in sys.argv and isinstance(value, list | dict):
            rows = value.items() if isinstance(value, dict) else ((each, "") for each in value)
            for key, what in rows:
                print(f"    {key} {what if not isinstance(what, list) else ' · '.join(what)}")


if __name__ == "__main__":
    main()
