"""Divide experts over the mesh axis `expert`: the method `expert_parallel` and its trace.

``expert_layers.py`` finds experts, ``divided_experts.py`` proves and applies the division, ``dispatch.py`` and
``listed_dispatch.py`` send tokens to experts and back, ``balance.py`` counts them. :class:`ExpertTrace` runs a plain
model for a prediction, sends nothing and notes everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal
from unittest import mock

import torch
from pydantic import Field
from torch import nn

from meshwright.cost import Block, Boundary, Moment, Parameter, Step, Traffic, send_boundaries
from meshwright.errors import MeshwrightError, StrategyError
from meshwright.methods.base import SHARDING, Conflict, Job, Method, Phase
from meshwright.methods.expert.balance import (
    ExpertLoad,
    RouterLoss,
    check_balance,
    count_questions,
    router_of,
    traced_z_loss,
)
from meshwright.methods.expert.dispatch import Call, ExpertAxis, TracedDispatch, TracedExperts, autocast_dtype
from meshwright.methods.expert.divided_experts import divide, prove
from meshwright.methods.expert.expert_layers import ExpertLayer, ListedExperts, StackedExperts, expert_layers
from meshwright.methods.job import AVERAGED, sum_over
from meshwright.methods.tensor.axis_exchange import TensorAxis
from meshwright.methods.tensor.block_trials import SampleRun
from meshwright.methods.tensor.traffic_log import SaveLog, TrafficLog, stand_in
from meshwright.nn import move_to
from meshwright.nn.module_structure import settings_of
from meshwright.runtime import check_equal
from meshwright.runtime.torch_internals.pytree import tree_leaves
from meshwright.strategy import Strategy

_COUNT_BYTES = 8  # a number of rows


def _proved(layers: Sequence[ExpertLayer], ranks: int) -> dict[ExpertLayer, tuple[int, float] | None]:
    """Prove layers; of those that run the same code on the same shapes, one."""
    settings = {layer: (type(layer), frozenset(settings_of(layer.block).items())) for layer in layers}
    first = {each: layer for layer, each in reversed(settings.items())}
    proofs = {each: prove(layer, ranks) for each, layer in first.items()}
    return {layer: proofs[each] for layer, each in settings.items()}


class ExpertTrace:
    """Runs a plain model as one rank of an expert axis would, and notes what it would send.

    Args:
        model: The model.
        layers: The model's experts.
        ranks: Number of ranks that divide them.
        tensor: The size of a tensor axis whose ranks, which are among them, have equal tokens.
        z_loss: Weight of the routers' z-loss.

    Attributes:
        experts: For each parameter of an expert, the number of its expert in a list (None: stacked), and of how many.
        dims: The dims of parameters that the axis divides along with the work: none.
        paths: Of the modules that hold experts.
        beside: Of the modules that :meth:`flowing` passes by: what lies around listed experts in their block.
        stands_in: Whether stacked experts are replaced by stand-ins, if they cannot run over fake tensors.

    Raises:
        ModelError: When listed experts cannot be divided.
    """

    divides_batch: ClassVar[bool] = True

    def __init__(
        self, model: nn.Module, layers: Sequence[ExpertLayer], ranks: int, tensor: int, z_loss: float | None = None
    ) -> None:
        parameters = dict(model.named_parameters())
        self._model, self._layers, self._ranks, self._tensor = model, layers, ranks, tensor
        self._z_loss = z_loss
        self._axis = TracedExperts(tensor)
        self._proved = _proved([e for e in layers if isinstance(e, ListedExperts) or e.takes_rows], ranks)
        self.experts = {
            parameters[name]: (number, layer.num_experts) for layer in layers for name, number in layer.names()
        }
        self.dims: dict[nn.Parameter, int] = {}
        self.paths = tuple(layer.own_path for layer in layers)
        self.beside = tuple(path for layer in layers for path in layer.beside())
        self.stands_in = False
        self._paths = {module: path for path, module in model.named_modules()}
        self._stack: list[nn.Module] = []  # the modules that run now
        self._traffic = TrafficLog(AXIS)

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape that a trace computes with: a part of a stack, which gets as many rows as a rank sends."""
        number, _ = self.experts.get(parameter, (0, 0))
        shape = tuple(parameter.shape)
        return shape if number is not None else (shape[0] // self._ranks, *shape[1:])

    @contextlib.contextmanager
    def running(self, log: SaveLog) -> Iterator[None]:
        """Note the exchanges of experts in a forward pass inside.

        Args:
            log: Grows with every tensor saved for backward.
        """
        self._traffic.begin(log)
        self._stack = []
        with contextlib.ExitStack() as stack:
            for module in self._model.modules():
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave, prepend=True, always_call=True).remove)
            for layer in self._layers:
                if isinstance(layer, ListedExperts) and self._proved[layer] is not None:
                    stack.enter_context(mock.patch.object(layer.block, "forward", self._mean_forward(layer)))
                elif isinstance(layer, StackedExperts):
                    count = layer.module.register_forward_pre_hook(self._counted(layer), with_kwargs=True)
                    stack.callback(count.remove)
                    stack.enter_context(self._divided(layer))
            stack.enter_context(traced_z_loss(self._model, self._layers, self._z_loss))
            yield

    @contextlib.contextmanager
    def flowing(self) -> Iterator[None]:
        """Let a plain model run without its experts inside, whose answers are what they are given.

        Other methods follow its data, or try its blocks with random values: what experts are given depends on values.
        """
        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                if isinstance(layer, StackedExperts) or self._proved[layer] is not None:
                    stack.enter_context(mock.patch.object(layer.holder, "forward", _passing_on))
            yield

    @contextlib.contextmanager
    def _divided(self, layer: StackedExperts) -> Iterator[None]:
        """Let a stack run as one rank's part of it, on rows that come from other ranks."""
        module, per_rank = layer.module, layer.num_experts // self._ranks
        with contextlib.ExitStack() as stack:
            for name in layer.counters:
                stack.enter_context(mock.patch.object(module, name, per_rank))
            forward = stand_in(module) if self.stands_in else module.forward
            dispatch = TracedDispatch(layer, self._axis, per_rank, self._share(layer))

            def run(*args: Any, **kwargs: Any) -> torch.Tensor:
                answers = dispatch(forward, *args, **kwargs)
                self._count_gather(answers, "forward")
                return answers

            stack.enter_context(mock.patch.object(module, "forward", run))
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _share(self, layer: StackedExperts) -> float:
        """Return the part of the pairs of a token and an expert in a call that are sent."""
        proved = self._proved.get(layer)
        return proved[1] / layer.num_experts if proved is not None else 1.0

    def _counted(self, layer: StackedExperts) -> Callable[..., None]:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call.of(layer, args, kwargs)
            grad = call.hidden.requires_grad or any(weight.requires_grad for weight in module.parameters())
            rows = round(call.index.numel() * self._share(layer))
            size = rows * call.hidden.shape[1] * autocast_dtype(call.hidden).itemsize
            self._count(layer, size, size, grad=grad)
            for each in (call.hidden, call.weights):
                self._count_gather(each, "backward")

        return count

    def _mean_forward(self, layer: ListedExperts) -> Callable[..., torch.Tensor]:
        """Return a forward that gives every expert equally many of the block's tokens and weighs the answers.

        Blocks decide by values what they ask: this one asks, computes and weighs what they do as a rule.
        """
        features, rate = self._proved[layer] or (0, 0.0)
        own = list(layer.experts)[: layer.num_experts // self._ranks]

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            hidden = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            tokens = hidden.reshape(-1, features)
            places = torch.arange(round(tokens.shape[0] * rate), device=hidden.device) % tokens.shape[0]
            grad = hidden.requires_grad or any(weight.requires_grad for weight in layer.experts.parameters())
            numel = len(places) * features
            self._count(layer, numel * hidden.element_size(), numel * autocast_dtype(hidden).itemsize, grad=grad)
            rows = tokens[places]
            self._count_gather(rows, "backward")
            parts = self._axis.echo(self._axis.cut(rows), grad=grad).tensor_split(len(own))
            answers = [expert(torch.cat([part])) for expert, part in zip(own, parts, strict=True)]
            back = self._axis.echo(torch.cat(answers).to(tokens.dtype), grad=grad)
            back = self._axis.gather(back, len(places))
            self._count_gather(back, "forward")
            again = places.clone()  # the block runs twice
            weighed = back * _factors(layer, tokens, again)
            return torch.zeros_like(tokens).index_add(0, again, weighed).view(hidden.shape)

        return forward

    def _count(self, layer: ExpertLayer, asked: int, answered: int, *, grad: bool) -> None:
        """Note an exchange: numbers of rows, the rows (``asked`` bytes), and the answers (``answered`` bytes).

        The ranks of a tensor axis each send a part of both.
        """
        path = self._paths[self._stack[-1]]
        asked, answered = asked // self._tensor, answered // self._tensor
        for size in (layer.num_experts * _COUNT_BYTES, asked, answered):
            self._traffic.note("all_to_all", "forward", size, path, self._stack)
        for size in (asked, answered) if grad else ():
            self._traffic.note("all_to_all", "backward", size, path, self._stack)

    def _count_gather(self, whole: torch.Tensor, moment: Moment) -> None:
        """Note what a tensor axis gathers: answers, or the gradient of that of which each of its ranks takes a part."""
        if self._tensor > 1 and (moment == "forward" or whole.requires_grad):
            rows = -(-len(whole) // self._tensor) * self._tensor
            size = rows * whole.shape[1] * whole.element_size()
            self._traffic.note("all_gather", moment, size, self._paths[self._stack[-1]], self._stack, "tensor")

    def boundaries(self, model: nn.Module, log: SaveLog) -> tuple[Boundary, ...]:
        """Return the collectives of the last run in one micro-batch."""
        return self._traffic.boundaries()


def _passing_on(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the first tensor of numbers, weighed by what else is given: routers have a gradient then."""
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    passed, *weights = (tensor for tensor in tensors if tensor.is_floating_point())
    for each in weights:
        passed = passed * (1 + each[..., :1]).to(passed.dtype)
    return passed.clone()


def _factors(layer: ListedExperts, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return a weight for every answer, by the block's router if it has a plain one."""
    inside, width = {*layer.experts.modules()}, (layer.num_experts, tokens.shape[1])
    others = (module for module in layer.block.modules() if module not in inside)
    router = next((each for each in others if getattr(getattr(each, "weight", None), "shape", None) == width), None)
    if router is None:
        return tokens.new_ones((len(places), 1))
    slots = torch.arange(len(places), device=tokens.device) // max(len(tokens), 1)
    chosen, _ = router(tokens).softmax(-1).topk(max(-(-len(places) // max(len(tokens), 1)), 1))
    return chosen[places, slots, None]


# --- The method

AXIS: Literal["expert"] = "expert"

_COUNTED = (*AVERAGED, "tensor")
"""The axes over which tokens of experts are counted."""


class ExpertParallel(Method):
    """Divides every layer's experts equally over the ranks of the axis ``expert`` (GShard: Lepikhin et al. 2020).

    The ranks take different samples, as data-parallel ranks do; beside a tensor axis its ranks divide the experts, too
    ([Note: experts beside a tensor axis] in ``dispatch.py``). An all-to-all sends tokens to the ranks of their
    experts, which compute with the layer's own code; another sends the answers back, where they are multiplied by the
    router's weights. No token is dropped.

    Stacked experts (transformers': Mixtral, Qwen-MoE, DeepSeek, …) are found by structure; lists of experts that a
    plain block loops over, by "expert" in the list's name or by ``experts``. A layer is tried in parts before it is
    divided, if its block takes one tensor.

    Config: None, or keys. ``{"experts": ["blocks.*.moe.units"]}`` names the modules that hold experts.
    """

    method_name: ClassVar[str] = "expert_parallel"
    phase: ClassVar[Phase] = Phase.TENSOR
    summary: ClassVar[str] = "divides experts over the expert axis; tokens are sent to them and back"
    effect: ClassVar[str] = "memory: experts / n. Communication: two all-to-alls of tokens per layer and pass"
    seed_name: ClassVar[str | None] = "ColossalAI: ep_size"
    axis: ClassVar[str | None] = AXIS
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *(
            Conflict(
                other=name,
                reason="gradients of what they leave out are averaged over all ranks, and those of experts are not",
                fix="leave these keys out",
                when=lambda own, other: bool(other.atorch_ignored_cls) or other.wrap_trainable_outmost,
                other_keys="atorch_ignored_cls or wrap_trainable_outmost",
            )
            for name in SHARDING
        ),
        Conflict(
            other="pipeline_parallel",
            reason="a stage learns the gradients of hidden states alone, not by what the loss was scaled",
            fix="leave z_loss out, or use bias_rate",
            when=lambda own, other: own.z_loss is not None,
            own_keys="z_loss",
        ),
    )

    experts: tuple[str, ...] = ()
    bias_rate: Annotated[float, Field(gt=0)] | None = None
    """By how much each expert's bias of the choice moves after a step, towards equal shares; None: not at all."""
    z_loss: Annotated[float, Field(gt=0)] | None = None
    """Weight of mean(logsumexp(logits)²) of every router, whose gradient is added; None: none."""

    @classmethod
    def parts_of(cls, model: nn.Module) -> int:
        """Return the number of experts that every layer with some can be divided into."""
        try:
            return math.gcd(*(layer.num_experts for layer in expert_layers(model, (), 1)))
        except MeshwrightError:  # there are none, or none that an axis can divide
            return 1

    def traced_layers(
        self, model: nn.Module, sizes: Mapping[str, int], sample: SampleRun | None, strategy: Strategy
    ) -> ExpertTrace | None:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        if sizes.get(AXIS, 1) == 1:
            return None
        tensor = sizes.get("tensor", 1)
        ranks = sizes[AXIS] * tensor
        with_equal_tokens = 1 if _divides_tokens(strategy) else tensor
        return ExpertTrace(model, expert_layers(model, self.experts, ranks), ranks, with_equal_tokens, self.z_loss)

    @property
    def _balances(self) -> bool:
        return self.bias_rate is not None or self.z_loss is not None

    def check(self, job: Job) -> None:
        """Refuse models whose experts cannot be divided, or balanced."""
        is_divided = job.size(AXIS) > 1
        if not is_divided and not self._balances:
            return
        if is_divided:
            _check_order([axis for axis, _ in job.axes], job.size("tensor"))
        layers = expert_layers(job.model, self.experts, _num_dividing(job) if is_divided else 1)
        check_balance(job.model, layers, by_bias=self.bias_rate is not None, by_z_loss=self.z_loss is not None)
        if self.bias_rate is not None:
            job.require_optimizer("expert_parallel: bias_rate", "after whose steps biases move", "leave bias_rate out")
        # Stored for apply, since the trial takes time, and a pipeline leaves this rank with a part of the model.
        found = [(layer, _features(layer, job) if is_divided else None) for layer in layers]
        job.expert_layers = found, _summary(layers, job) if is_divided else ""

    def apply(self, job: Job) -> None:
        """Divide the experts, and count their tokens; the rest of the model stays whole on every rank."""
        if job.expert_layers is None:
            return
        layers, summary = job.expert_layers
        present = set(job.model.modules())  # of a pipeline, this rank's
        here = [(layer, features) for layer, features in layers if layer.holder in present]
        self._balance(job, [layer for layer, _ in layers], [layer for layer, _ in here])
        job.expert_layers = None  # they would keep the experts of other ranks alive
        if job.size(AXIS) == 1:
            return
        check_equal("The division of the experts", summary, "give every rank the same model")
        job.notices.append(summary)
        have_equal_tokens = job.size("tensor") > 1 and not _divides_tokens(job.strategy)
        beside = TensorAxis(job.require_mesh()["tensor"]) if have_equal_tokens else None
        axis = ExpertAxis(job.mesh_axes.flat_mesh(AXIS, "tensor"), job.size(AXIS), beside)
        assert job.expert_load is not None, "_balance has made it"
        job.experts = divide(here, axis, job.device, job.expert_load)
        job.is_split = True
        if job.shard_axis is None:
            move_to(job.model, job.device)

    def _balance(self, job: Job, layers: list[ExpertLayer], here: list[ExpertLayer]) -> None:
        """Count the tokens of every layer's experts, and let biases and losses work on the routers of this rank."""
        parts = job.size("tensor") if _divides_tokens(job.strategy) else 1
        repeats = job.size("tensor") // parts  # tensor ranks with equal tokens

        def sum_over_tokens(counts: torch.Tensor) -> torch.Tensor:
            return sum_over(job.mesh_axes, counts, _COUNTED) // repeats

        def sum_over_all(counts: torch.Tensor) -> torch.Tensor:
            return sum_over(job.mesh_axes, counts, (*_COUNTED, "pipeline")) // repeats

        load = ExpertLoad(layers, job.device, sum_over_all)
        for layer in here:
            if isinstance(layer, StackedExperts):
                load.count_calls(layer)
            elif job.size(AXIS) == 1:
                count_questions(load, layer)
        if self.bias_rate is not None:
            job.optimizer.after_update.append(load.follow_bias(job.model, here, self.bias_rate, sum_over_tokens))
        job.optimizer.after_update.append(load.end_step)
        job.expert_load = load
        if self.z_loss is not None:
            # Gradients of routers are sums over the tensor ranks where these have different tokens.
            loss = RouterLoss(self.z_loss / parts, job.device)
            for layer in here:
                router = router_of(job.model, layer)
                assert router is not None, "check has found it"
                loss.attach(router, layer.num_experts)
            job.loss_func = loss.follow(job.loss_func)

    def cost(self, step: Step) -> Step:
        """Divide the experts, and add exchanges in which every expert is sent equally many tokens.

        Real traffic has this mean over the ranks; a rank whose experts are chosen more often receives more.
        """
        if step.size(AXIS) == 1:
            return step
        ranks = _num_dividing(step)
        step = step.replace(blocks=tuple(_divided(block, step, ranks) for block in step.blocks))
        if self.bias_rate is not None:
            size = _counts_bytes(step)
            step = step.send(*(Traffic("all_reduce", axis, size, "update") for axis in _COUNTED))
        return send_boundaries(step, AXIS)


def _divides_tokens(strategy: Strategy) -> bool:
    """Return whether the ranks of a tensor axis have different tokens where experts are asked."""
    tensor: Any = strategy.get("tensor_parallel")
    return tensor is not None and bool(tensor.sequence)


def _counts_bytes(step: Step) -> int:
    """Return the bytes of the numbers of tokens of all experts here: of each layer's exchanges they are the first."""
    first: dict[str, int] = {}
    for each in step.boundaries:
        if (each.axis, each.kind, each.moment) == (AXIS, "all_to_all", "forward"):
            first.setdefault(each.path, each.num_bytes)
    return sum(first.values())


def _check_order(axes: Sequence[str], tensor: int) -> None:
    """Refuse a mesh on which the ranks of both axes do not ascend: torch numbers those of a group in that order."""
    if tensor > 1 and axes.index("tensor") > axes.index(AXIS):
        raise StrategyError(
            "expert_parallel: the axis tensor lies around the axis expert",
            expected="tensor before expert in parallel_mode, which lists axes innermost first",
            got=", ".join(axes),
            fix="exchange the two",
        )


def _num_dividing(owner: Job | Step) -> int:
    """Return the number of ranks that divide experts."""
    return owner.size(AXIS) * owner.size("tensor")


def _features(layer: ExpertLayer, job: Job) -> int | None:
    proved = prove(layer, _num_dividing(job))
    if proved is None and isinstance(layer, ListedExperts):
        job.notices.append(f"expert_parallel: {layer.path} was not tried in parts: it takes more than one tensor")
    return proved[0] if proved is not None else None


def _summary(layers: Sequence[ExpertLayer], job: Job) -> str:
    sizes = {name: parameter.numel() for name, parameter in job.model.named_parameters()}
    inside = sum(sizes[name] for layer in layers for name, _ in layer.names())
    counts = sorted({layer.num_experts for layer in layers})
    share = 100 * inside / sum(sizes.values())
    return (
        f"expert_parallel divides {share:.0f}% of the parameters over {_num_dividing(job)} "
        f"ranks: {' or '.join(map(str, counts))} experts in each of {len(layers)} layers"
    )


def _divided(block: Block, step: Step, ranks: int) -> Block:
    parts = (_part(parameter, step, ranks) for parameter in block.parameters)
    return dataclasses.replace(block, parameters=tuple(part for part in parts if part is not None))


def _part(parameter: Parameter, step: Step, ranks: int) -> Parameter | None:
    """Return the first rank's part of a parameter, None if it has none. All ranks hold as much: experts are equal."""
    if parameter.expert is None:
        return parameter
    number, experts = parameter.expert
    if number is not None and number >= experts // ranks:
        return None
    shape = parameter.shape if number is not None else (parameter.shape[0] // ranks, *parameter.shape[1:])
    # Ranks along the axis hold different experts, so experts cannot be sharded over it.
    sharded = step.shard_axis != AXIS
    if shape == parameter.shape and sharded == parameter.sharded:
        return parameter
    return dataclasses.replace(parameter, shape=shape, sharded=sharded)
