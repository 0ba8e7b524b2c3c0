"""Which layers of a block can be split together, read off the autograd graph of one forward pass.

A layer split by rows takes a part of the features from every rank; so it must be fed by nothing but layers split by
columns, and these must feed nothing else. What is found are hypotheses: ``proof`` tries them out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.methods.tensor.styles import features, is_linear

Runs = Callable[[], Any]


@dataclass(frozen=True)
class Region:
    """Layers between which a rank has a part of the features only."""

    columns: tuple[str, ...]  # linear layers and embeddings whose outputs are split
    row: str  # the linear layer that puts the parts together
    fused: tuple[tuple[tuple[int, ...], ...], ...]  # for every column: sizes of parts that its output may consist of

    @property
    def name(self) -> str:
        """All layers of it."""
        return " + ".join((*self.columns, self.row))


@dataclass
class Flow:
    """What feeds what in one forward pass; names are paths of modules, ``""`` stands for an input of the block."""

    feeds: dict[str, set[str]] = field(default_factory=dict)  # layer -> what its input is computed from
    outputs: set[str] = field(default_factory=set)  # what outputs of the block are computed from, nothing in between
    cuts: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)  # layer -> sizes that its output is cut into
    calls: list[str] = field(default_factory=list)  # layers in the order in which they ran


class _Mark(torch.autograd.Function):
    """Identity that leaves a name in the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.mark = name
        return tensor.clone()  # a view could not be changed in place, which blocks do

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def mark_input(leaf: Any) -> Any:
    """Marks a tensor with a gradient as an input of the block."""
    return _Mark.apply(leaf, "") if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf


def record_flow(block: nn.Module, run: Runs) -> Flow:
    """Runs a block and reads off what feeds what.

    Args:
        block: Its modules with parameters of their own are the layers.
        run: Calls it with inputs of which the whole ones are marked by :func:`mark_input`.
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
    """The marks reached first from a node of the graph; notes how what lies behind a mark is cut."""
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
    sizes = getattr(node, "_saved_split_sizes", None)
    return tuple(int(size) for size in sizes) if sizes else ()


def regions(block: nn.Module, flow: Flow) -> list[Region]:
    """The groups of layers that may be split together, in the order in which their row layers run."""
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
    """The linear layers and embeddings that feed a layer, through norms within heads; None when others do, too."""
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
    """Whether a layer's output goes elsewhere. A bias of the scores, looked up once, may go on to later blocks."""
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
    """Sizes of the parts that an output may consist of, likeliest first; () for a single part."""
    if not is_linear(module):
        return ((),)
    outputs = features(module)[1]
    equal = [(outputs // parts,) * parts for parts in (3, 2) if outputs % parts == 0]
    exact = [sizes for sizes in cuts if sum(sizes) == outputs and len(sizes) > 1]
    return tuple(dict.fromkeys([*exact, (), *equal]))
