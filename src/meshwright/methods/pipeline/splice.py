"""Run one model stage by stage by splicing the blocks of other ranks out of it.

[Note: splicing]
Every rank runs the model's own ``forward``, whatever it contains; nothing is traced or rewritten. Each place of the
block list holds the rank's own block, wrapped by :meth:`Splice.around_block`, or an :class:`Elsewhere`, a module
without parameters for a block of another rank. While stage s runs with blocks first … end - 1:

- Code before the list runs on every rank. Its hidden state is only a placeholder of the right shape, since embeddings
  that a rank does not train return zeros; what it prepares for all blocks (masks, rotary tables) is right.
- Blocks before ``first`` are skipped: each returns the hidden state received from the stage before, in the structure
  that a block returns (:class:`Form`).
- The stage's blocks compute. Only the last block's output may reach later blocks, which is checked, so it is all that
  must be sent.
- The call of block ``end`` raises :class:`_Stop`, which leaves ``forward`` with the stage's output
  (:class:`HiddenState`). In the last stage nothing stops: code behind the list (norm, head) runs there only.

Random draws: every run of a micro-batch starts from one seed on all ranks, so that code before the list draws alike
everywhere; a stage's blocks draw from a seed of their own (:class:`BlockDraws`).

Around it: ``stage_cut.py`` decides the stages, ``outer_parameters.py`` finds which parameters outside the list each
block depends on and which ranks hold them, :func:`release_other_parts` below removes the rest of the model from a rank;
``chain.py`` and ``execution.py`` run the stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.inspect import Record, Watched, captured
from meshwright.methods.pipeline.outer_parameters import STAND_INS, Replacement, carried_positions, replacements_of
from meshwright.methods.pipeline.stage_cut import BlockList, Cut
from meshwright.nn import Part, wrap_method
from meshwright.nn.module_structure import STANDS_FOR
from meshwright.runtime import GeneratorState, preserved_rng, seed_in_use, spread_seed
from meshwright.runtime.torch_internals.modules import buffers_of, children_of, parameters_of
from meshwright.runtime.torch_internals.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

_EVALUATION = torch.Generator()  # apart from torch's generator, so that evaluation changes no random draw of training


def draw_seeds(count: int) -> list[int]:
    """Draw random seeds for ``count`` runs, the same on all ranks of a pipeline if all call it together."""
    generator = None if torch.is_grad_enabled() else _EVALUATION
    seeds: list[int] = torch.randint(2**62, (count,), generator=generator, device="cpu").tolist()
    return seeds


@contextlib.contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Seed the random generators inside; restore their state afterwards."""
    with preserved_rng():
        seed_in_use(seed)
        yield


# Of any model: a criterion may belong to another pipelined model than the one whose stage calls it.
_LOSS_STAYS_HERE: ContextVar[bool] = ContextVar("_LOSS_STAYS_HERE", default=False)
loss_stays_here = _LOSS_STAYS_HERE.get


@contextlib.contextmanager
def keeping_loss_here() -> Iterator[None]:
    """Leave the losses computed inside to the caller, who tells the other ranks of the pipeline."""
    token = _LOSS_STAYS_HERE.set(True)
    try:
        yield
    finally:
        _LOSS_STAYS_HERE.reset(token)


class BlockDraws:
    """Gives a stage's blocks random draws of their own, since dropout masks must differ between stages.

    Args:
        stage: Number of the stage.
        seed: Seed of the run.
    """

    def __init__(self, stage: int, seed: int) -> None:
        self._stage, self._seed = stage, seed
        self._outside: GeneratorState | None = None

    def enter(self) -> None:
        """Switch to the stage's draws, before its first block."""
        self._outside = GeneratorState.now()
        seed_in_use(spread_seed(self._seed, self._stage))

    def leave(self) -> None:
        """Return to the draws outside the blocks, behind its last block."""
        assert self._outside is not None, "the first block has run"
        self._outside.restore()


# --- Running a stage


@dataclass(frozen=True)
class Form:
    """The structure of a block's output around its tensors; sent to the next stage, whose model expects the same."""

    outline: Any  # the output with its leaves numbered
    values: tuple[Any, ...]  # per leaf: its value if it is a number or string, else None
    places: tuple[int, ...]  # the leaves that the next block takes: the hidden state

    def filled(self, tensors: list[torch.Tensor]) -> Any:
        """Rebuild a block's output with these tensors as its hidden state; its other tensors are None."""
        leaves = list(self.values)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_map(leaves.__getitem__, self.outline)


class HiddenState(NamedTuple):
    """The hidden state that a stage other than the last computes."""

    tensors: list[torch.Tensor]
    form: Form


class _Stop(Exception):
    """Leaves the model's forward at the end of a stage."""

    def __init__(self, hidden: HiddenState) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class _Running:
    """State of the stage that runs now."""

    first: int  # its blocks: first … end - 1
    end: int
    inbox: HiddenState | None  # hidden state received; None: the first stage
    draws: BlockDraws
    output: Any = None  # output of the block that ran last
    inputs: list[Any] = field(default_factory=list)  # inputs of that block, flattened
    records: list[Record] = field(default_factory=list)  # tensors that the model's code inspects


class Splice:
    """Runs single stages of a model whose blocks are wrapped by :meth:`around_block`; see [Note: splicing].

    Attributes:
        cut: The stages.
        dtype: Dtype that stand-ins of embeddings return; None: that of the weights.
    """

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.dtype: torch.dtype | None = None
        self._running: _Running | None = None
        self._recorded: dict[int, list[list[Watched]]] = {}  # by stage, for every run

    @property
    def is_running(self) -> bool:
        """True while a stage runs."""
        return self._running is not None

    def run(self, stage: int, inbox: HiddenState | None, forward: Callable[[], Any], seed: int) -> Any:
        """Run a stage.

        Args:
            stage: Number of the stage.
            inbox: The hidden state of the stage before; None for the first.
            forward: Calls the model, whose forward runs inside :meth:`until_stage_end`.
            seed: Random seed of this micro-batch, the same for all stages.

        Returns:
            A :class:`HiddenState`, or what ``forward`` returns where the stage is the last.
        """
        with self._stage(stage, inbox, BlockDraws(stage, seed)), drawing(seed):
            return forward()

    def take_records(self) -> dict[int, list[list[Watched]]]:
        """Return and clear what each stage has recorded for an inspector, run by run; empty lists without one."""
        taken, self._recorded = self._recorded, {}
        return taken

    @contextlib.contextmanager
    def _stage(self, stage: int, inbox: HiddenState | None, draws: BlockDraws) -> Iterator[None]:
        first, end = self.cut.bounds[stage : stage + 2]
        with captured() as records, keeping_loss_here():
            self._running = _Running(first, end, inbox, draws, records=records)
            try:
                yield
            finally:
                self._running = None
        self._recorded.setdefault(stage, []).append([Watched.of(record) for record in records])

    @staticmethod
    def until_stage_end(forward: Callable[[], Any]) -> Any:
        """Call the model's forward; return early with the hidden state once the stage's last block has run."""
        try:
            return forward()
        except _Stop as stop:
            return stop.hidden

    def around_block(self, index: int) -> Callable[..., Any]:
        """Return the wrapper of block ``index``; it is called with the block's own call, None on other ranks."""

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
                raise _Stop(_hidden_state(running, args, kwargs))
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
        leaves = _leaves_of(args, kwargs)
        if index > running.first:
            _check_nothing_else(running, leaves)
        elif running.inbox is not None:
            carried_positions(list(running.inbox.tensors), leaves)
            running.records.clear()  # code before the list is recorded by the first stage only
        running.inputs = leaves


_LEAVES = {torch.Tensor, nn.Parameter, bool, int, float, str, type(None)}


def _leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the leaves of a block's arguments; most are leaves themselves, which torch takes twenty calls to find."""
    given = [*args, *kwargs.values()]
    return given if _LEAVES.issuperset(map(type, given)) else tree_leaves(given)


def _hidden_state(running: _Running, args: Any, kwargs: Any) -> HiddenState:
    leaves = _leaves_of(args, kwargs)
    _check_nothing_else(running, leaves)
    outputs, spec = tree_flatten(running.output)
    places = tuple(carried_positions(outputs, leaves))
    values = tuple(leaf if isinstance(leaf, int | float | str) else None for leaf in outputs)
    outline = tree_unflatten(list(range(len(outputs))), spec)
    return HiddenState([outputs[place] for place in places], Form(outline, values, places))


def _check_nothing_else(running: _Running, leaves: list[Any]) -> None:
    """Refuse a block input that depends on earlier blocks other than through the last one's output."""
    outputs = _leaves_of((running.output,), {})
    carried = carried_positions(outputs, leaves)
    known = {id(leaf) for leaf in running.inputs} | {id(outputs[place]) for place in carried}
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    strange = [leaf for leaf in tensors if id(leaf) not in known]
    if strange:
        raise ModelError(
            "pipeline_parallel: a block's input depends on earlier blocks, and not through the last one's output",
            expected="blocks that take what the block before returned, and what is the same for all blocks",
            got=f"a tensor of shape {tuple(strange[0].shape)} that needs a gradient",
            fix="let every block return what later ones need, or train this model with fsdp",
        )


# --- One rank's part of a model
#
# What other ranks hold is removed in place, so that names of parameters stay those of the whole model.


def part_of(model: nn.Module, cut: Cut, rank: int) -> Part:
    """Map every entry of the whole model's state dict to the ranks that hold it, before other parts are released."""
    trained = {model.get_parameter(item.name): item.trained_on for item in cut.outside}
    holders: dict[str, tuple[int, ...]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        inside = cut.rank_of(name)
        if inside is not None:
            holders[name] = (inside,)
        elif isinstance(value, nn.Parameter):
            holders[name] = trained[value]
        else:
            holders[name] = _ranks_of_buffer(cut, name.rpartition(".")[0])
    return Part(tuple(holders), holders, rank, cut.num_ranks)


def _ranks_of_buffer(cut: Cut, path: str) -> tuple[int, ...]:
    """Return the ranks on which a module outside the blocks gets the inputs that it gets in one process."""
    if any(name.rpartition(".")[0] == path for name in cut.late):
        return (cut.ranks[-1],)
    beside = next((item.trained_on for item in cut.outside if item.name.rpartition(".")[0] == path), None)
    return beside if beside is not None else tuple(range(cut.num_ranks))


def release_other_parts(
    model: nn.Module, blocks: BlockList, cut: Cut, rank: int, splice: Splice, device: torch.device
) -> None:
    """Release what other ranks hold, in place, and wrap this rank's blocks by ``splice``.

    ``device`` is where the parameters of a model on meta will be.
    """
    elsewhere = [model.get_parameter(item.name) for item in cut.outside if rank not in item.trained_on]
    # Decided for all before the first is released, which changes modules.
    released = [(parameter, *each) for parameter in elsewhere for each in replacements_of(model, parameter, cut.late)]
    for parameter, module, name, replacement in released:
        _release(module, name, parameter, replacement, splice, device if parameter.is_meta else parameter.device)
    for index, block in enumerate(blocks):
        if cut.rank_of_block(index) == rank:
            wrap_method(block, "__call__", splice.around_block(index))
        else:
            blocks[index] = Elsewhere(block, splice.around_block(index))


def _release(
    module: nn.Module,
    name: str,
    parameter: nn.Parameter,
    replacement: Replacement,
    splice: Splice,
    device: torch.device,
) -> None:
    if replacement == "buffer":
        del parameters_of(module)[name]
        module.register_buffer(name, parameter.detach(), persistent=False)
        return
    setattr(module, name, None)
    # A module that was wrapped for another of its parameters has a forward of its own already.
    if replacement == "stands in" and type(module).forward in STAND_INS:
        dtype = parameter.dtype
        # Models ask for its device and dtype: expanded zeros answer, and take no memory.
        del parameters_of(module)[name]
        setattr(module, name, torch.zeros((), dtype=dtype, device=device).expand(parameter.shape))
        wrap_method(module, "forward", lambda forward, *args, **kwargs: _stand_in(module, splice.dtype or dtype, *args))


def _stand_in(module: nn.Module, dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like the output of one of :data:`STAND_INS`, computed without the module's parameters."""
    if isinstance(module, nn.Embedding):
        return torch.zeros((), dtype=dtype, device=tensor.device).expand(*tensor.shape, module.embedding_dim)
    return tensor


class Absent:
    """The readable remains of a module on another rank: plain attributes, tensors without data, children."""

    def __init__(self, module: nn.Module) -> None:
        vars(self).update((name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)
        for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
            vars(self)[name] = None if tensor is None else tensor.detach().to("meta")
        for name, child in children_of(module).items():
            vars(self)[name] = None if child is None else Absent(child)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r} is asked of a block, or of a part of one, that is on another pipeline rank")


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


class Elsewhere(nn.Module):
    """A placeholder in the list for a block of another rank; it holds no tensors.

    The block's attributes stay readable through :class:`Absent`, since some models ask their layers for them.
    """

    def __init__(self, block: nn.Module, around: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_block"] = Absent(block)  # not a submodule: it must be in no state dict
        self.__dict__[STANDS_FOR] = type(block)
        self._around = around

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the block."""
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the hidden state by, or end the stage; see [Note: splicing]."""
        return self._around(None, *args, **kwargs)

    def extra_repr(self) -> str:
        """Describe the placeholder in ``print(model)``."""
        return "on another pipeline rank"
