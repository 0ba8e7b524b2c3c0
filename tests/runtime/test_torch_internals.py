"""Names with an underscore are taken from torch in one place, and the torch that is installed has them."""

import ast
import importlib
import inspect
import re

import pytest
import torch
import torch.nn.functional as F

from meshwright.runtime.torch_internals.autograd import split_sizes_of
from meshwright.runtime.torch_internals.operators import cast_grouped_products
from tests.house import INTERNALS, SOURCE, torch_internals

FILES = sorted((SOURCE / INTERNALS).glob("[!_]*.py"))
# Attributes that only some of torch 2.11 to 2.15 have: the file that names one looks it up.
NOT_IN_EVERY_TORCH = {
    "_fsdp_param_group": "up to torch 2.11 a unit has one group",
    "_fsdp_param_groups": "later it may have several",
    "_reset_iter_state": "since torch 2.13",
    "_get_grad_send_meta": "since torch 2.12",
    "_validate_fwd_outputs": "up to torch 2.11",
    "_saved_split_sizes": "of the nodes of torch.split alone, tested below",
    "_is_avx512_bf16_supported": "of some builds for CPUs",
    "_is_amx_tile_supported": "of some builds for CPUs",
    "_dump_nccl_trace_json": "of builds for CUDA",
    "_precomputed_scale": "torchao's",
    "_is_fsdp_managed_module": "transformers'",
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def imported(tree):
    """Modules and names that a file imports of torch: ``(module, name)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "torch":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.startswith("torch."))


def chains(tree):
    """Private names that a file reaches from ``torch`` by dots, such as ``torch._C._current_graph_task_id``."""
    aliases = {"_T": "torch.Tensor", "_aten": "torch.ops.aten", "Variable": "torch.autograd.Variable"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if aliases.get(first, first).split(".")[0] == "torch" and any(map(is_private, rest.split("."))):
                yield f"{aliases.get(first, first)}.{rest}"


def attributes(tree):
    """Private attributes of torch's objects: those of getters, of constants, and those that are read or set."""
    ours = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"_[a-z]\w+", node.value):
            yield node.value
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ours | defined:
            if ast.unparse(node).partition(".")[0] in ("torch", "_T", "_aten", "Variable"):
                continue
            yield node.attr
        elif isinstance(node, ast.ClassDef) and node.bases:  # methods of torch that ours replace
            yield from (each.name for each in node.body if isinstance(each, ast.FunctionDef) and is_private(each.name))


def sources_of(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ATTRIBUTES_OF":
            return ast.literal_eval(node.value)
    return ()


def find(path):
    """The object at a path of names, importing as far as that goes."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AttributeError(path)


def has(source, name):
    """Whether an object has an attribute, or the source of a module or class speaks of it."""
    try:
        found = find(source)
    except (ImportError, AttributeError):
        return False
    if hasattr(found, name):
        return True
    try:
        return re.search(rf"\b{name}\b", inspect.getsource(found)) is not None
    except (OSError, TypeError):
        return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_installed_torch_has_every_name(path):
    tree = ast.parse(path.read_text())
    wanted = [module if name is None else f"{module}.{name}" for module, name in imported(tree)] + [*chains(tree)]
    lacking = []
    for name in wanted:
        try:
            find(name)
        except AttributeError:
            lacking.append(name)
    sources = sources_of(tree)
    for name in sorted(set(attributes(tree)) - NOT_IN_EVERY_TORCH.keys()):
        if not any(has(source, name) for source in sources):
            lacking.append(f"{name} (of {', '.join(sources) or 'nothing named in ATTRIBUTES_OF'})")
    assert not lacking, f"torch {torch.__version__} has none of these, which {path.name} takes: {lacking}"
    assert wanted or sources, f"{path.name} takes nothing from torch"


def test_a_split_says_its_sizes():
    pieces = torch.ones(3, requires_grad=True).split([1, 2])
    assert tuple(split_sizes_of(pieces[0].grad_fn)) == (1, 2)


def test_no_other_file_names_one():
    others = {name: names for name, names in torch_internals().items() if not name.startswith(INTERNALS)}
    assert not others, f"take these from {INTERNALS}, and say there why: {others}"


def test_every_file_says_why():
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_covers_grouped_products(dtype):
    cast_grouped_products("cpu")
    cast_grouped_products("cpu")  # once is enough
    cast_grouped_products("meta")
    rows, weights = torch.randn(8, 16, requires_grad=True), torch.randn(2, 16, 8, requires_grad=True)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    with torch.autocast("cpu", dtype):
        found = F.grouped_mm(rows, weights, offs=ends)
        narrow = F.grouped_mm(rows, weights[..., :4].contiguous(), offs=ends)
    expected = F.grouped_mm(rows.detach().to(dtype), weights.detach().to(dtype), offs=ends)
    assert torch.equal(found, expected)
    assert found.dtype == dtype
    assert narrow.dtype == torch.float32  # rows of 8 bytes, for which there is no kernel
    leaves = (rows, weights)
    by_hand = F.grouped_mm(rows.to(dtype), weights.to(dtype), offs=ends)
    gradients = [torch.autograd.grad(each.float().square().sum(), leaves) for each in (found, by_hand)]
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
    assert F.grouped_mm(rows, weights, offs=ends).dtype == torch.float32
