"""Find a tensor-parallel plan in the data flow of a model's blocks, for models that bring none.

For each kind of block: record which layers feed which (:func:`record_flow`), group them into regions of column layers
and one row layer (:func:`regions`), then try hypotheses about each region (what is fused in its layers, which
attributes count heads or widths) until one passes the proof ([Note: proof of a split] in ``split_proof.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.methods.tensor.block_trials import (
    VIEWS,
    Adjustment,
    RecordedBlock,
    Refuted,
    SampleRun,
    evaluating,
    reason_of,
    record_calls,
    signature,
)
from meshwright.methods.tensor.split_checks import HEAD_COUNTS, undivided_heads, vocabulary_entries
from meshwright.methods.tensor.split_plan import PlannedLayer, planned
from meshwright.methods.tensor.split_proof import BlockProof
from meshwright.nn import call_with, features, is_linear, is_transposed
from meshwright.runtime.torch_internals.autograd import split_sizes_of
from meshwright.runtime.torch_internals.pytree import tree_leaves

Runs = Callable[[], Any]


@dataclass(frozen=True)
class Region:
    """Layers between which a rank has only a part of the features."""

    columns: tuple[str, ...]  # linear layers and embeddings whose outputs are split
    row: str  # the linear layer that combines the parts
    fused: tuple[tuple[tuple[int, ...], ...], ...]  # for every column: sizes of parts that its output may consist of

    @property
    def name(self) -> str:
        """Paths of all layers, for errors."""
        return " + ".join((*self.columns, self.row))


@dataclass
class Flow:
    """Data flow between the layers of a block in one forward pass, by path; ``""`` is an input of the block."""

    feeds: dict[str, set[str]] = field(default_factory=dict)  # layer -> the layers its input is computed from directly
    outputs: set[str] = field(default_factory=set)  # the layers that outputs of the block are computed from directly
    cuts: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)  # layer -> sizes that its output is cut into
    calls: list[str] = field(default_factory=list)  # layers in the order of their calls


class _Mark(torch.autograd.Function):
    """Identity that leaves a name in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.mark = name
        return tensor.clone()  # blocks may change it in place, which a view would forbid

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def mark_input(leaf: Any) -> Any:
    """Mark a tensor with a gradient as an input of the block."""
    return _Mark.apply(leaf, "") if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf


def record_flow(block: nn.Module, run: Runs) -> Flow:
    """Run a block and record the data flow between its layers.

    Args:
        block: The block; its modules with parameters of their own are the layers.
        run: Calls the block with inputs of which the whole ones are marked by :func:`mark_input`.
    """
    flow = Flow()
    with _marking(block, flow):
        output = run()
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            flow.outputs |= _sources(leaf.grad_fn, None)
    return flow


@contextlib.contextmanager
def _marking(block: nn.Module, flow: Flow) -> Iterator[None]:
    hooks = []
    for path, module in block.named_modules():
        if path and next(module.parameters(recurse=False), None) is not None:
            hooks.append(module.register_forward_pre_hook(_entering(path, flow), prepend=True))
            hooks.append(module.register_forward_hook(lambda _, __, output, path=path: _marked(output, path)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _marked(output: Any, path: str) -> Any:
    return _Mark.apply(output, path) if isinstance(output, torch.Tensor) and output.requires_grad else output


def _entering(path: str, flow: Flow) -> Callable[..., None]:
    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        flow.calls.append(path)
        sources = flow.feeds.setdefault(path, set())
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                sources |= _sources(tensor.grad_fn, flow.cuts)

    return enter


def _sources(node: Any, cuts: dict[str, list[tuple[int, ...]]] | None) -> set[str]:
    """Return the first marks reached from a node of the graph; note in ``cuts`` how marked outputs are cut."""
    found: set[str] = set()
    seen, waiting = {node}, [(node, None)]
    while waiting:
        current, consumer = waiting.pop()
        mark = getattr(current, "mark", None)
        if mark is not None:
            found.add(mark)
            sizes = _cut_sizes(consumer)
            if cuts is not None and sizes and sizes not in cuts.setdefault(mark, []):
                cuts[mark].append(sizes)
            continue
        for following, _ in current.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append((following, current))
    return found


def _cut_sizes(node: Any) -> tuple[int, ...]:
    sizes = split_sizes_of(node)
    return tuple(int(size) for size in sizes) if sizes else ()


def regions(block: nn.Module, flow: Flow) -> list[Region]:
    """Return the groups of layers that may be split together, in the order of their row layers' calls."""
    modules = dict(block.named_modules())
    found: list[Region] = []
    taken: set[str] = set()
    for row in dict.fromkeys(flow.calls):
        columns = _columns(row, modules, flow) if is_linear(modules[row]) else None
        if not columns or row in taken or taken & set(columns):
            continue
        if any(_escapes(column, row, flow, columns) for column in columns):
            continue
        ordered = tuple(path for path in dict.fromkeys(flow.calls) if path in columns)
        found.append(
            Region(ordered, row, tuple(_part_sizes(modules[path], flow.cuts.get(path, [])) for path in ordered))
        )
        taken |= {row, *columns}
    return found


def _columns(row: str, modules: dict[str, nn.Module], flow: Flow) -> set[str] | None:
    """Return the linear layers and embeddings that feed a layer, also through norms; None if others feed it, too."""
    columns: set[str] = set()
    waiting, seen = list(flow.feeds[row]), set(flow.feeds[row])
    while waiting:
        path = waiting.pop()
        if not path:
            return None
        if is_linear(modules[path]) or isinstance(modules[path], nn.Embedding):
            columns.add(path)
            continue
        before = flow.feeds[path] - seen
        if not flow.feeds[path]:
            return None
        seen |= before
        waiting += before
    return columns if any(is_linear(modules[path]) for path in columns) else None


def _escapes(column: str, row: str, flow: Flow, columns: set[str]) -> bool:
    """Return whether another layer takes a column's output without leading to the row layer.

    Outputs of the block do not count: a bias of the attention scores, looked up once, may go to later blocks.
    """
    others = {path for path, sources in flow.feeds.items() if column in sources and path != row}
    inside = {path for path in others if _leads_to(path, row, flow)}
    return bool(others - inside)


def _leads_to(path: str, row: str, flow: Flow) -> bool:
    waiting, seen = [row], {row}
    while waiting:
        for source in flow.feeds.get(waiting.pop(), ()):
            if source == path:
                return True
            if source and source not in seen:
                seen.add(source)
                waiting.append(source)
    return False


def _part_sizes(module: nn.Module, cuts: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of parts that an output may consist of, likeliest first; () for a single part."""
    if not is_linear(module):
        return ((),)
    outputs = features(module)[1]
    equal = [(outputs // parts,) * parts for parts in (3, 2) if outputs % parts == 0]
    exact = [sizes for sizes in cuts if sum(sizes) == outputs and len(sizes) > 1]
    return tuple(dict.fromkeys([*exact, (), *equal]))


# --- Finding and proving a plan

_SIZE_WORDS = ("dim", "size", "group", "mask")


@dataclass(frozen=True)
class Entry:
    """The style of one layer in a found plan."""

    style: str
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class FoundPlan:
    """A found plan, by path, as plain data."""

    entries: dict[str, Entry]
    adjustments: tuple[Adjustment, ...]
    remarks: tuple[str, ...]  # layers that stay whole although one might expect otherwise


@dataclass(frozen=True)
class _FoundBlock:
    entries: dict[str, Entry]
    adjustments: tuple[Adjustment, ...]
    output_dims: tuple[int | None, ...]
    whole: tuple[str, ...]  # linear layers that are not split


def find_plan(model: nn.Module, sample: SampleRun | None, ranks: int) -> FoundPlan:
    """Find how a model's blocks can be split over ``ranks`` ranks, without changing the model.

    Raises:
        ModelError: When a block cannot be split, with the reason.
    """
    blocks = record_calls(model, sample, ranks)
    known: dict[Any, _FoundBlock] = {}
    dims: list[tuple[int | None, ...]] = []
    entries: dict[str, Entry] = {}
    adjustments: list[Adjustment] = []
    whole: dict[str, None] = {}
    for block in blocks:
        block = block.with_split_inputs(dims)
        key = signature(block)
        if key not in known:
            known[key] = _find_in_block(block, ranks)
        found = known[key]
        dims.append(found.output_dims)
        entries |= {f"{block.path}.{path}": entry for path, entry in found.entries.items()}
        adjustments += [dataclasses.replace(a, path=_joined(block.path, a.path)) for a in found.adjustments]
        whole |= dict.fromkeys(found.whole)
    vocabulary, remark = vocabulary_entries(model, ranks)
    entries |= {path: Entry(style) for path, style in vocabulary.items()}
    remarks = [remark] if remark else []
    if whole:
        remarks.append(f"{', '.join(whole)} of the blocks stay whole")
    return FoundPlan(entries, tuple(adjustments), tuple(remarks))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if name else path


def _find_in_block(block: RecordedBlock, ranks: int) -> _FoundBlock:
    module, call = block.module, block.call
    assert call is not None
    linear = [path for path, each in module.named_modules() if is_linear(each)]
    proof = BlockProof(module, call, ranks)
    if not linear:
        return _FoundBlock({}, (), (None,) * proof.num_outputs(), ())
    candidates = _regions(block, proof)
    if not candidates:
        raise _cannot(block.path, "no linear layer of it is fed by linear layers alone")
    layers: list[PlannedLayer] = []
    adjustments: tuple[Adjustment, ...] = ()
    trial = proof.of_values()
    for region in candidates:
        layers, adjustments = _choose(block, trial, region, layers, adjustments, ranks)
    try:
        summed, dims = proof.holds(layers, adjustments)
    except Refuted as refuted:
        raise _cannot(block.path, str(refuted)) from refuted
    entries = {layer.path: Entry(layer.style.name, layer.parts) for layer in layers}
    for name in summed:
        entries.setdefault(name.rpartition(".")[0], Entry("replicated_with_grad_allreduce"))
    return _FoundBlock(entries, adjustments, tuple(dims), tuple(path for path in linear if path not in entries))


def _regions(block: RecordedBlock, proof: BlockProof) -> list[Region]:
    def run() -> Any:
        split = dict(proof.call.split)
        leaves = [leaf if i in split else mark_input(leaf) for i, leaf in enumerate(proof.call.values())]
        args, kwargs = proof.call.tree(leaves)
        return call_with(block.module, proof.state, args, kwargs)

    with evaluating(block.module):
        try:
            flow = record_flow(block.module, run)
        except Exception as error:
            raise _cannot(block.path, f"it does not run by itself: {reason_of(error)}") from error
    return regions(block.module, flow)


def _choose(
    block: RecordedBlock,
    proof: BlockProof,
    region: Region,
    layers: list[PlannedLayer],
    adjustments: tuple[Adjustment, ...],
    ranks: int,
) -> tuple[list[PlannedLayer], tuple[Adjustment, ...]]:
    """Return the layers and adjustments chosen so far with the first hypothesis about a region that is not refuted."""
    _check_heads(block, region, ranks)
    reason = ""
    for more, changes in _hypotheses(block.module, region, ranks, adjustments):
        for split in _subsets(proof.call.split):
            try:
                proof.given(split).holds([*layers, *more], changes)
            except Refuted as refuted:
                reason = reason or str(refuted)
                continue
            return [*layers, *more], changes
    _check_head_counts(block, region, ranks)
    raise _cannot(f"{block.path} ({region.name})", reason or f"a tensor axis of {ranks} does not divide its features")


def _subsets(split: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield subsets of the split inputs, since some may belong to regions that come later."""
    for size in range(len(split), -1, -1):
        yield from itertools.combinations(split, size)


def _cannot(path: str, reason: str) -> ModelError:
    return ModelError(
        f"tensor_parallel: {path} cannot be split",
        expected="linear layers that feed linear layers, in code that takes sizes and heads from its tensors, such as "
        "view(…, -1, head_dim), or from attributes of its own module",
        got=reason,
        fix="use a tensor axis that divides the number of heads; or change its code; or give a plan for the layers "
        "that can be split, such as plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}; or use fsdp, which "
        "splits any model",
    )


def _check_heads(block: RecordedBlock, region: Region, ranks: int) -> None:
    for path, name, value in _counts(block.module, region):
        if value % ranks:
            raise undivided_heads(f"{name} of {_joined(block.path, path)}", value, ranks)


def _check_head_counts(block: RecordedBlock, region: Region, ranks: int) -> None:
    """Raise a clearer error if no split was found and a transformers config has heads that cannot be divided."""
    for _, parent in _parents(block.module, region):
        for name in HEAD_COUNTS if "attention" in type(parent).__name__.lower() else ():
            count = getattr(getattr(parent, "config", None), name, None)
            if isinstance(count, int) and count % ranks:
                raise undivided_heads(name, count, ranks)


def _hypotheses(
    module: nn.Module, region: Region, ranks: int, before: tuple[Adjustment, ...]
) -> Iterator[tuple[list[PlannedLayer], tuple[Adjustment, ...]]]:
    """Yield ways to split a region: what is fused in its layers, and which attributes count a rank's share."""
    row = planned(module, region.row, "rowwise")
    if features(row.module)[0] % ranks:
        return
    for parts in itertools.product(*region.fused):
        if any(size % ranks for sizes in parts for size in sizes):
            continue
        columns = [_column(module, path, sizes) for path, sizes in zip(region.columns, parts, strict=True)]
        if any(layer.parameters()[0][1].shape[layer.parameters()[0][2] or 0] % ranks for layer in columns):
            continue
        for changes in _adjustments(module, region, parts, ranks):
            known = {(change.path, change.name) for change in before}
            yield [*columns, row], (*before, *(c for c in changes if (c.path, c.name) not in known))


def _column(module: nn.Module, path: str, parts: tuple[int, ...]) -> PlannedLayer:
    style = "embedding_colwise" if isinstance(module.get_submodule(path), nn.Embedding) else "colwise"
    return dataclasses.replace(planned(module, path, style), parts=parts)


def _adjustments(
    module: nn.Module, region: Region, parts: tuple[tuple[int, ...], ...], ranks: int
) -> Iterator[tuple[Adjustment, ...]]:
    """Yield sets of attributes to divide: those that layers need, then with head counts, with widths, with both.

    Last come views of the whole's shape, alone and with widths.
    """
    own = tuple(
        Adjustment(path, "nf", features(module.get_submodule(path))[1] // ranks)
        for path in region.columns
        if is_transposed(module.get_submodule(path))
    )
    counts = tuple(Adjustment(path, name, value // ranks) for path, name, value in _counts(module, region))
    widths = tuple(
        Adjustment(path, name, value // ranks) for path, name, value in _widths(module, region, parts, ranks)
    )
    views = tuple(Adjustment(path, VIEWS, ranks) for path, _ in _parents(module, region))
    yield from dict.fromkeys([own, own + counts, own + widths, own + counts + widths])
    yield from dict.fromkeys([own + views, own + widths + views])


def _parents(module: nn.Module, region: Region) -> list[tuple[str, nn.Module]]:
    paths = dict.fromkeys(path.rpartition(".")[0] for path in (*region.columns, region.row))
    return [(path, module.get_submodule(path)) for path in paths]


def _integers(module: nn.Module) -> list[tuple[str, int]]:
    return [(name, value) for name, value in vars(module).items() if type(value) is int]


def _counts(module: nn.Module, region: Region) -> list[tuple[str, str, int]]:
    """Return the attributes that count heads, in the modules that hold the region's layers."""
    return [
        (path, name, value)
        for path, parent in _parents(module, region)
        for name, value in _integers(parent)
        if "head" in name and not any(word in name for word in _SIZE_WORDS)
    ]


def _widths(
    module: nn.Module, region: Region, parts: tuple[tuple[int, ...], ...], ranks: int
) -> list[tuple[str, str, int]]:
    """Return the attributes that equal the size of a region's layer's output."""
    sizes = {size for every in parts for size in every}
    sizes |= {
        features(module.get_submodule(path))[1] for path in region.columns if is_linear(module.get_submodule(path))
    }
    sizes.add(features(module.get_submodule(region.row))[0])
    return [
        (path, name, value)
        for path, parent in _parents(module, region)
        for name, value in _integers(parent)
        if value in sizes and value % ranks == 0
    ]
