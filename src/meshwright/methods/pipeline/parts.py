"""One rank's part of a model: its own blocks, and of what lies outside the blocks that which it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from meshwright.methods.pipeline.cut import Cut, Outside
from meshwright.methods.pipeline.splice import Splice
from meshwright.methods.pipeline.trace import Dataflow
from meshwright.nn import Part, wrap_method

Fate = Literal["gone", "stands in", "lent"]


def place_outside(model: nn.Module, blocks: list[nn.Module], ranks: list[int], flow: Dataflow | None) -> list[Outside]:
    """Which pipeline ranks hold the parameters outside the blocks.

    Args:
        model: The whole model.
        blocks: Of the list that is cut.
        ranks: The pipeline rank of every block.
        flow: What each block depends on; None: unknown, so every rank trains everything.
    """
    inside = {parameter for block in blocks for parameter in block.parameters()}
    everyone = set(ranks)
    found = []
    for name, parameter in model.named_parameters():
        if parameter in inside:
            continue
        trained, lent = set(everyone), set()
        if flow is not None:
            trained = {rank for rank, uses in zip(ranks, flow.uses, strict=True) if name in uses}
            trained = trained or {ranks[-1]}  # used by nobody: somebody must store it
            others = everyone - trained
            lent = others if any(f == "lent" for _, _, f in _fates(model, parameter, flow.late)) else set()
        found.append(Outside(name, tuple(sorted(trained)), tuple(sorted(lent))))
    return found


def place_stages(
    model: nn.Module, path: str, bounds: tuple[int, ...], ranks: tuple[int, ...], flow: Dataflow | None
) -> Cut:
    """The cut with these bounds of stages on these ranks: places what lies outside the blocks.

    Args:
        model: The whole model.
        path: Of the list of blocks.
        bounds: Stage s computes blocks ``bounds[s]`` … ``bounds[s + 1] - 1``.
        ranks: The pipeline rank of every stage.
        flow: See :func:`place_outside`.
    """
    blocks = list(model.get_submodule(path).children())
    cut = Cut(path, bounds, ranks, ())
    owners = [cut.rank_of_block(index) for index in range(len(blocks))]
    return dataclasses.replace(
        cut,
        outside=tuple(place_outside(model, blocks, owners, flow)),
        late=flow.late if flow is not None else frozenset(),
        boundary_bytes=flow.boundary_bytes if flow is not None else None,
    )


def parameter_costs(model: nn.Module, blocks: list[nn.Module], flow: Dataflow | None) -> list[int]:
    """The time of every block where it is unknown: a matrix costs in proportion to its elements.

    What is before the blocks counts with the first, and what is behind them with the last. Looking up an embedding
    costs next to nothing.
    """
    costs = [sum(p.numel() for p in block.parameters()) for block in blocks]
    if flow is None:
        return costs
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    looked_up = {name for name, p in model.named_parameters() if id(p) in tables}
    costs[0] += sum(sizes[name] for name in flow.uses[0] - looked_up - (flow.tail if len(blocks) == 1 else set()))
    costs[-1] += sum(sizes[name] for name in flow.tail)
    return costs


def _fates(model: nn.Module, parameter: nn.Parameter, late: frozenset[str]) -> Iterator[tuple[nn.Module, str, Fate]]:
    """What becomes of a parameter where it is not needed: per module that owns it, and its name there."""
    for path, module in model.named_modules():
        for name, own in module.named_parameters(recurse=False):
            if own is not parameter:
                continue
            if (f"{path}.{name}" if path else name) in late:
                yield module, name, "gone"
            elif _stand_in_of(module) is not None:
                yield module, name, "stands in"
            else:
                yield module, name, "lent"


def part_of(model: nn.Module, cut: Cut, rank: int) -> Part:
    """What a rank shall know of the whole model before its other parts are freed."""
    trained = {model.get_parameter(item.name): item.trained_on for item in cut.outside}
    homes: dict[str, tuple[int, ...]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        inside = cut.rank_of(name)
        if inside is not None:
            homes[name] = (inside,)
        elif isinstance(value, nn.Parameter):
            homes[name] = trained[value]
        else:
            homes[name] = _homes_of_buffer(cut, name.rpartition(".")[0])
    return Part(tuple(homes), homes, rank, cut.num_ranks)


def _homes_of_buffer(cut: Cut, path: str) -> tuple[int, ...]:
    """The ranks on which a module outside the blocks sees what it sees in one process."""
    if any(name.rpartition(".")[0] == path for name in cut.late):
        return (cut.ranks[-1],)
    beside = next((item.trained_on for item in cut.outside if item.name.rpartition(".")[0] == path), None)
    return beside if beside is not None else tuple(range(cut.num_ranks))


def keep_part(model: nn.Module, blocks: nn.ModuleList, cut: Cut, rank: int, splice: Splice) -> None:
    """Frees what other ranks hold, in place; the names of what stays are those of the whole model."""
    elsewhere = [model.get_parameter(item.name) for item in cut.outside if rank not in item.trained_on]
    fates = [(parameter, *fate) for parameter in elsewhere for fate in _fates(model, parameter, cut.late)]
    for parameter, module, name, fate in fates:  # all were told before: releasing changes modules
        _release(module, name, parameter, fate, splice)
    for index, block in enumerate(blocks):
        if cut.rank_of_block(index) == rank:
            wrap_method(block, "__call__", splice.around_block(index))
        else:
            blocks[index] = Elsewhere(block, splice.around_block(index))


def _release(module: nn.Module, name: str, parameter: nn.Parameter, fate: Fate, splice: Splice) -> None:
    if fate == "lent":
        del module._parameters[name]
        module.register_buffer(name, parameter.detach(), persistent=False)
        return
    setattr(module, name, None)
    stand_in = _stand_in_of(module)
    if fate == "stands in" and stand_in is not None:
        dtype = parameter.dtype
        del module._parameters[name]  # some ask its device and type; zeros that take no memory, as what it computes
        setattr(module, name, torch.zeros((), dtype=dtype, device=parameter.device).expand(parameter.shape))
        wrap_method(module, "forward", lambda forward, *args, **kwargs: stand_in(module, splice.dtype or dtype, *args))


class Absent:
    """What stays readable of a module on another rank: its plain attributes, tensors without data, its children."""

    def __init__(self, module: nn.Module) -> None:
        vars(self).update((name, value) for name, value in vars(module).items() if name not in _KEPT_BY_MODULES)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            vars(self)[name] = None if tensor is None else tensor.detach().to("meta")
        for name, child in module._modules.items():
            vars(self)[name] = None if child is None else Absent(child)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r} is asked of a block, or of a part of one, that is on another pipeline rank")


_KEPT_BY_MODULES = frozenset(vars(nn.Module())) - {"training"}


class Elsewhere(nn.Module):
    """Stands in the list where a block of another rank was; it holds no tensors.

    Attributes of the block stay readable, as :class:`Absent` has them: some models ask their layers for them.
    """

    def __init__(self, block: nn.Module, around: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_block"] = Absent(block)  # no submodule: it is in nobody's state dict
        self._around = around

    def __getattr__(self, name: str) -> Any:
        """What the block had."""
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hands the hidden state on."""
        return self._around(None, *args, **kwargs)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return "on another pipeline rank"


def _stand_in_of(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Computes something of the right shape without the module's parameters; None where that is not known."""
    kind = type(module).forward
    if kind is nn.Embedding.forward:
        return _as_embedding
    return _as_norm if kind in (nn.LayerNorm.forward, nn.RMSNorm.forward) else None


def _as_embedding(module: nn.Module, dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    assert isinstance(module, nn.Embedding)
    zero = torch.zeros((), dtype=dtype, device=ids.device)
    return zero.expand(*ids.shape, module.embedding_dim)  # takes no memory


def _as_norm(module: nn.Module, dtype: torch.dtype, hidden: torch.Tensor) -> torch.Tensor:
    return hidden
