"""Run one model stage by stage by splicing the blocks of other ranks out of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.inspect import Record, Watched, captured
from meshwright.methods.pipeline.outer_parameters import Dataflow, carried_positions
from meshwright.methods.pipeline.stage_cut import Cut, Outside
from meshwright.nn import Part, wrap_method
from meshwright.runtime import GeneratorState, preserved_rng, seed_in_use, spread_seed
from meshwright.runtime.torch_internals.modules import buffers_of, children_of, parameters_of
from meshwright.runtime.torch_internals.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

_EVALUATION = torch.Generator()  # so that evaluating changes no draw of training


def draw_seeds(count: int) -> list[int]:
    """Seed of so many runs, alike on all ranks of a pipeline, which ask together."""
    generator = None if torch.is_grad_enabled() else _EVALUATION
    seeds: list[int] = torch.randint(2**62, (count,), generator=generator, device="cpu").tolist()
    return seeds


@contextlib.contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Generators that begin at a seed, and are afterwards as they were."""
    with preserved_rng():
        seed_in_use(seed)
        yield


class BlockDraws:
    """Lets the blocks of a stage draw for themselves: equal dropout masks in all stages would not be independent.

    Args:
        stage: Its number.
        seed: Of the run.
    """

    def __init__(self, stage: int, seed: int) -> None:
        self._stage, self._seed = stage, seed
        self._outside: GeneratorState | None = None

    def enter(self) -> None:
        """Before the first of them."""
        self._outside = GeneratorState.now()
        seed_in_use(spread_seed(self._seed, self._stage))

    def leave(self) -> None:
        """Behind the last of them: goes on with what was drawn outside."""
        assert self._outside is not None, "the first block has run"
        self._outside.restore()


# --- One model, run stage by stage: foreign blocks pass the hidden state by, and a stage ends where its last block
# ends.
#
# A model's own forward runs on every rank. Before a stage's first block it computes with whatever comes along; there
# the hidden state received takes its place. What it prepares for the blocks besides (masks, rotary tables) is right.


@dataclass(frozen=True)
class Form:
    """What a block returns, around its tensors: travels to the next stage, whose model expects the same."""

    outline: Any  # the output itself with its leaves numbered
    values: tuple[Any, ...]  # per leaf: its value, if it is a plain one
    places: tuple[int, ...]  # of the leaves that the next block takes: the hidden state

    def filled(self, tensors: list[torch.Tensor]) -> Any:
        """A block's output with these tensors as its hidden state; other tensors of it are None."""
        leaves = list(self.values)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_map(leaves.__getitem__, self.outline)


class Handed(NamedTuple):
    """What a stage that is not the last computes."""

    tensors: list[torch.Tensor]
    form: Form


class _Stop(Exception):
    """Leaves the model's forward at the end of a stage."""

    def __init__(self, handed: Handed) -> None:
        super().__init__()
        self.handed = handed


@dataclass
class _Running:
    """The stage that runs now."""

    first: int  # its blocks: first … end - 1
    end: int
    inbox: Handed | None  # None: the first stage
    draws: BlockDraws
    output: Any = None  # of the block that ran last
    inputs: list[Any] = field(default_factory=list)  # of that block, flattened
    records: list[Record] = field(default_factory=list)  # of what the model's code inspects


class Splice:
    """Runs single stages of a model whose blocks call :meth:`around_block` around themselves."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.dtype: torch.dtype | None = None  # what the stand-ins of embeddings compute in; None: as the weights
        self._running: _Running | None = None
        self._recorded: dict[int, list[list[Watched]]] = {}  # by stage, of every run

    @property
    def is_running(self) -> bool:
        """Return whether a stage runs now."""
        return self._running is not None

    def run(self, stage: int, inbox: Handed | None, forward: Callable[[], Any], seed: int) -> Any:
        """Run a stage.

        Args:
            stage: Its number.
            inbox: What the stage before handed on; None for the first.
            forward: Calls the model, whose forward :meth:`until_handed` guards.
            seed: Of this micro-batch, the same for all stages.

        Returns:
            A :class:`Handed`, or what ``forward`` returns where the stage is the last.
        """
        with self._stage(stage, inbox, BlockDraws(stage, seed)), drawing(seed):
            return forward()

    def take_records(self) -> dict[int, list[list[Watched]]]:
        """Return what each stage has recorded, run by run, since it was last asked.

        Empty lists where nobody inspects.
        """
        taken, self._recorded = self._recorded, {}
        return taken

    @contextlib.contextmanager
    def _stage(self, stage: int, inbox: Handed | None, draws: BlockDraws) -> Iterator[None]:
        first, end = self.cut.bounds[stage : stage + 2]
        with captured() as records:
            self._running = _Running(first, end, inbox, draws, records=records)
            try:
                yield
            finally:
                self._running = None
        self._recorded.setdefault(stage, []).append([Watched.of(record) for record in records])

    @staticmethod
    def until_handed(forward: Callable[[], Any]) -> Any:
        """Return the model's forward, which ends early when the stage's last block has run."""
        try:
            return forward()
        except _Stop as stop:
            return stop.handed

    def around_block(self, index: int) -> Callable[..., Any]:
        """Return what happens in the place of block ``index``.

        Called with the block's own call, None for a foreign one.
        """

        def around(call: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
            running = self._running
            if running is None:
                raise ModelError(
                    "pipeline_parallel: a block was called by itself",
                    expected="calls of the whole model",
                    got=f"a call of block {index}",
                    fix="call the model that accelerate returned",
                )
            if index >= running.end:
                raise _Stop(_handed(running, args, kwargs))
            if index < running.first:
                assert running.inbox is not None
                return running.inbox.form.filled(running.inbox.tensors)
            assert call is not None
            self._check_inputs(running, index, args, kwargs)
            if index == running.first:
                running.draws.enter()
            output = call(*args, **kwargs)
            if index == running.end - 1:
                running.draws.leave()
            running.output = output
            return output

        return around

    def _check_inputs(self, running: _Running, index: int, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        if index > running.first:
            _check_nothing_else(running, leaves)
        elif running.inbox is not None:
            carried_positions(list(running.inbox.tensors), leaves)
            running.records.clear()  # what comes before a stage's blocks, the stage before has recorded
        running.inputs = leaves


def _handed(running: _Running, args: Any, kwargs: Any) -> Handed:
    leaves = tree_leaves((args, kwargs))
    _check_nothing_else(running, leaves)
    outputs, spec = tree_flatten(running.output)
    places = tuple(carried_positions(outputs, leaves))
    values = tuple(leaf if isinstance(leaf, int | float | str) else None for leaf in outputs)
    outline = tree_unflatten(list(range(len(outputs))), spec)
    return Handed([outputs[place] for place in places], Form(outline, values, places))


def _check_nothing_else(running: _Running, leaves: list[Any]) -> None:
    """Refuse inputs of a block that depend on earlier blocks in another way than through the last one's output."""
    outputs = tree_leaves(running.output)
    carried = carried_positions(outputs, leaves)
    known = {id(leaf) for leaf in running.inputs} | {id(outputs[place]) for place in carried}
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    strange = [leaf for leaf in tensors if id(leaf) not in known]
    if strange:
        raise ModelError(
            "pipeline_parallel: a block's input depends on earlier blocks, and not through the last one's output",
            expected="blocks that take what the block before returned, and what is the same for all blocks",
            got=f"a tensor of shape {tuple(strange[0].shape)} that needs a gradient",
            fix="let every block hand on what later ones need, or train this model with fsdp",
        )


# --- One rank's part of a model: its own blocks, and of what lies outside the blocks that which it needs.

Fate = Literal["gone", "stands in", "lent"]


def place_outside(model: nn.Module, blocks: list[nn.Module], ranks: list[int], flow: Dataflow | None) -> list[Outside]:
    """Return which pipeline ranks hold the parameters outside the blocks.

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
    """Return the cut with these bounds of stages on these ranks: places what lies outside the blocks.

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
    """Return the time of every block where it is unknown: a matrix costs in proportion to its elements.

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
    """Return what a rank shall know of the whole model before its other parts are freed."""
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
    """Return the ranks on which a module outside the blocks sees what it sees in one process."""
    if any(name.rpartition(".")[0] == path for name in cut.late):
        return (cut.ranks[-1],)
    beside = next((item.trained_on for item in cut.outside if item.name.rpartition(".")[0] == path), None)
    return beside if beside is not None else tuple(range(cut.num_ranks))


def keep_part(model: nn.Module, blocks: nn.ModuleList, cut: Cut, rank: int, splice: Splice) -> None:
    """Free what other ranks hold, in place; the names of what stays are those of the whole model."""
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
        del parameters_of(module)[name]
        module.register_buffer(name, parameter.detach(), persistent=False)
        return
    setattr(module, name, None)
    stand_in = _stand_in_of(module)
    if fate == "stands in" and stand_in is not None:
        dtype = parameter.dtype
        del parameters_of(module)[name]  # some ask its device and type; zeros that take no memory, as what it computes
        setattr(module, name, torch.zeros((), dtype=dtype, device=parameter.device).expand(parameter.shape))
        wrap_method(module, "forward", lambda forward, *args, **kwargs: stand_in(module, splice.dtype or dtype, *args))


class Absent:
    """What stays readable of a module on another rank: its plain attributes, tensors without data, its children."""

    def __init__(self, module: nn.Module) -> None:
        vars(self).update((name, value) for name, value in vars(module).items() if name not in _KEPT_BY_MODULES)
        for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
            vars(self)[name] = None if tensor is None else tensor.detach().to("meta")
        for name, child in children_of(module).items():
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
        """Return what the block had."""
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the hidden state on."""
        return self._around(None, *args, **kwargs)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return "on another pipeline rank"


def _stand_in_of(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Compute something of the right shape without the module's parameters; None where that is not known."""
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
