"""Find the experts of a model, and check that an axis can divide them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from meshwright.errors import ModelError, StrategyError, join_names

_ARGUMENTS = 3  # tokens, the experts of each, and their weights, as in calls of transformers' experts


@dataclass(frozen=True, eq=False)
class StackedExperts:
    """A module whose parameters hold all experts along dim 0, called with tokens, their experts and weights.

    Transformers' experts (Mixtral, Qwen-MoE, DeepSeek, GPT-OSS, …) have this form, and any module called like them.
    Those of Llama-4 are called with rows alone, equally many for each expert: every token, weighted, or zeros.
    """

    path: str
    module: nn.Module
    num_experts: int
    counters: tuple[str, ...]  # attributes of the module that hold the number of experts
    block: nn.Module  # that the module lies in
    takes_rows: bool = (
        False  # is called with rows (experts · n, H), first those of expert 0; rows of zeros count nothing
    )

    @property
    def holder(self) -> nn.Module:
        """The module that sends tokens."""
        return self.module

    @property
    def own_path(self) -> str:
        """Path of the module that holds the experts."""
        return self.path

    def names(self) -> list[tuple[str, int | None]]:
        """Return the parameters' full names, each with None: a rank holds a part of each."""
        return [(f"{self.path}.{name}", None) for name, _ in self.module.named_parameters()]

    def beside(self) -> list[str]:
        """Return the paths of modules with parameters that run in the holder beside the experts: none."""
        return []


@dataclass(frozen=True, eq=False)
class ListedExperts:
    """A module that calls the experts in an ``nn.ModuleList`` of its own."""

    path: str
    block: nn.Module
    name: str  # of the list in the block

    @property
    def holder(self) -> nn.Module:
        """The module that sends tokens."""
        return self.block

    @property
    def own_path(self) -> str:
        """Path of the module that holds the experts."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def experts(self) -> nn.ModuleList:
        """The list of experts."""
        found = getattr(self.block, self.name)
        assert isinstance(found, nn.ModuleList)
        return found

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.experts)

    def names(self) -> list[tuple[str, int | None]]:
        """Return the parameters' full names, each with the number of its expert: a rank holds whole experts."""
        return [
            (f"{self.own_path}.{number}.{name}", number)
            for number, expert in enumerate(self.experts)
            for name, _ in expert.named_parameters()
        ]

    def beside(self) -> list[str]:
        """Return the paths of modules with parameters that run in the holder beside the experts, such as a router."""
        inside = {*self.experts.modules()}
        around = self.block.named_modules(prefix=self.path)
        return [path for path, each in around if each not in inside and any(True for _ in each.parameters(False))]


ExpertLayer = StackedExperts | ListedExperts


def expert_layers(model: nn.Module, patterns: Sequence[str], ranks: int) -> list[ExpertLayer]:
    """Find a model's experts and check that an axis of ``ranks`` ranks can divide them.

    Args:
        model: A plain module.
        patterns: Paths of modules that hold experts, with ``*`` for any part; if empty, stacked experts are found by
            structure, and lists by "expert" in their name.
        ranks: Size of the axis.

    Raises:
        ModelError: When there are none, or the axis cannot divide them.
        StrategyError: When a pattern names nothing that holds experts.
    """
    layers = list(_found(model, patterns))
    for pattern in patterns:
        if not any(fnmatchcase(layer.own_path, pattern) for layer in layers):
            raise StrategyError(
                f"expert_parallel: {pattern!r} names no module that holds experts",
                expected="an nn.ModuleList of experts, or a module with stacked parameters and a number of experts",
                got=_present(model),
                fix="correct the path, or leave experts out to have them found",
            )
    if not layers:
        raise ModelError(
            "expert_parallel: the model has no experts that can be divided",
            expected="a module called with (tokens, index, weights) that holds parameters of shape (experts, …) and "
            "their number as num_experts, or an nn.ModuleList of experts with 'expert' in its name",
            got=f"{type(model).__name__} with {_present(model)}",
            fix="name the lists: ('expert_parallel', {'experts': ['blocks.*.moe.units']}); put stacked parameters into "
            "a module of their own, called in this way",
        )
    for layer in layers:
        _check(layer, ranks)
    _check_owned(model, layers)
    return layers


def loops_over_experts(model: nn.Module) -> bool:
    """Return whether experts are called one by one: where they are listed, or a model of transformers says so."""
    for layer in _found(model, ()):
        config = None if isinstance(layer, ListedExperts) else getattr(layer.module, "config", None)
        if isinstance(layer, ListedExperts) or getattr(config, "_experts_implementation", None) == "eager":
            return True
    return False


def _found(model: nn.Module, patterns: Sequence[str]) -> Iterator[ExpertLayer]:
    modules = dict(model.named_modules())
    inside: list[str] = []
    for path, module in modules.items():
        if any(path.startswith(outer + ".") for outer in inside):
            continue
        named = any(fnmatchcase(path, pattern) for pattern in patterns)
        if patterns and not named:
            continue
        parent, _, name = path.rpartition(".")
        if isinstance(module, nn.ModuleList):
            if (named or "expert" in name.lower()) and len(module) and next(module.parameters(), None) is not None:
                inside.append(path)
                yield ListedExperts(parent, modules[parent], name)
        elif path and (stacked := _stacked(path, module, modules[parent])) is not None:
            inside.append(path)
            yield stacked


def _stacked(path: str, module: nn.Module, block: nn.Module) -> StackedExperts | None:
    own = list(module.parameters(recurse=False))
    if not any(parameter.dim() == 3 for parameter in own):
        return None
    num_experts = max((p for p in own if p.dim() == 3), key=torch.Tensor.numel).shape[0]
    counters = tuple(
        name
        for name, value in vars(module).items()
        if "expert" in name.lower() and type(value) is int and value == num_experts
    )
    takes = len(inspect.signature(type(module).forward).parameters) - 1
    if not counters or 1 < takes < _ARGUMENTS:
        return None
    return StackedExperts(path, module, num_experts, counters, block, takes_rows=takes == 1)


def _check(layer: ExpertLayer, ranks: int) -> None:
    if layer.num_experts % ranks:
        raise ModelError(
            f"expert_parallel: the axis does not divide the experts of {layer.own_path}",
            expected=f"a number of experts that {ranks} divides",
            got=str(layer.num_experts),
            fix="choose another size of the axis 'expert' in parallel_mode; the ranks of a tensor axis divide experts, "
            "too",
        )
    if isinstance(layer, StackedExperts):
        own = {name for name, p in layer.module.named_parameters(recurse=False) if p.shape[:1] == (layer.num_experts,)}
        other = [name for name, _ in layer.module.named_parameters() if name not in own]
        if other:
            raise ModelError(
                f"expert_parallel: {layer.path} has parameters that are not one for each expert",
                expected=f"parameters of shape ({layer.num_experts}, …)",
                got=join_names(other),
                fix="keep them in the module that calls the experts",
            )
        return
    shapes = [[(name, p.shape, p.dtype) for name, p in expert.named_parameters()] for expert in layer.experts]
    if any(each != shapes[0] for each in shapes):
        raise ModelError(
            f"expert_parallel: the experts in {layer.own_path} differ",
            expected="parameters of the same names and shapes in each",
            got="different names, shapes or dtypes",
            fix="name lists of equal experts with the key experts, or leave the method out",
        )


def _check_owned(model: nn.Module, layers: Sequence[ExpertLayer]) -> None:
    """Refuse experts' parameters that other modules share: only one side would be divided."""
    divided = {name for layer in layers for name, _ in layer.names()}
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    tied = [every for every in names.values() if len(every) > 1 and divided.intersection(every)]
    if tied:
        raise ModelError(
            "expert_parallel: parameters of experts are shared with other modules",
            expected="parameters that belong to one expert alone",
            got=join_names(tied[0]),
            fix="untie them, or leave the method out",
        )


def _present(model: nn.Module) -> str:
    holders = [path for path, module in model.named_modules() if _could_be(path, module)]
    return f"these that look like it: {join_names(holders)}"


def _could_be(path: str, module: nn.Module) -> bool:
    stacked = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return bool(path) and (isinstance(module, nn.ModuleList) or stacked or "expert" in path.rpartition(".")[2].lower())
