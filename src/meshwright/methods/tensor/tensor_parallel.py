"""Split single layers over the mesh axis `tensor`: the method `tensor_parallel` and its trace.

``model_split.py`` decides the split, ``split_layers.py`` applies it; :class:`SplitTrace` does the same to a model that
is traced for a prediction, where it sends nothing and notes everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self
from unittest import mock

import torch
from pydantic import BeforeValidator
from torch import nn

from meshwright.cost import Block, Boundary, CollectiveKind, Moment, Parameter, Step, send_boundaries
from meshwright.errors import StrategyError
from meshwright.loss import Vocabulary
from meshwright.methods.base import Job, Method, Phase
from meshwright.methods.planner_hooks import SearchScope, within_node
from meshwright.methods.tensor.axis_exchange import GatheredInput, TensorAxis, TokenWise, TracedAxis, as_products
from meshwright.methods.tensor.block_trials import SampleRun, adjusted
from meshwright.methods.tensor.model_split import (
    Split,
    change_hidden_input,
    change_hidden_output,
    check_tokens,
    gather_around,
    gathered_over,
    gathers_of,
    linear_layers,
    needs_undivided_experts,
    on_all_tokens,
    split_of,
)
from meshwright.methods.tensor.split_checks import check_grouped, refuse_router_loss
from meshwright.methods.tensor.split_layers import logits_in_parts, share_key, split_layers, swapped_parameters
from meshwright.methods.tensor.split_plan import (
    EXPERTS,
    LATENT,
    WIDE_NORM,
    PlannedLayer,
    is_adapted,
    norm_in_parts,
    rotated_features,
)
from meshwright.methods.tensor.split_proof import TOKENS_DIM
from meshwright.methods.tensor.traffic_log import SaveLog as SaveLog, TrafficLog, stand_in, tensor_bytes
from meshwright.nn import is_linear, is_transposed, move_to
from meshwright.runtime import check_equal
from meshwright.runtime.torch_internals.modules import parameters_of
from meshwright.runtime.torch_internals.pytree import tree_leaves
from meshwright.strategy import Strategy


class SplitTrace:
    """Runs a plain model, with parameters of one rank's shapes, as one rank of a tensor axis would.

    Args:
        model: The model.
        split: The layers that are split; every divided dim is a multiple of ``ranks``.
        ranks: Size of the axis.
        keeps_gathered: See :func:`~meshwright.methods.tensor.split_layers.split_layers`.
        sums_together: See there.

    Attributes:
        dims: The dim of each parameter that the axis divides.
        stands_in: Whether stacked experts are replaced by stand-ins, if they cannot run over fake tensors.
    """

    divides_batch: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        ranks: int,
        *,
        keeps_gathered: bool = False,
        sums_together: bool = True,
    ) -> None:
        self._model, self._split, self._keeps = model, split, keeps_gathered
        self._layers, self._ranks, self._sequence = split.layers, ranks, split.sequence
        self._axis = TracedAxis(ranks)
        self._token_wise = TokenWise(model, split.sequence.blocks) if split.sequence is not None else None
        self.dims = {
            parameter: dim for layer in self._layers for _, parameter, dim in layer.parameters() if dim is not None
        }
        self.stands_in = False
        self._summing = split.summed_together(model) if sums_together else {}
        self._together = {place for places in self._summing.values() for place in places}
        self._traffic = TrafficLog(AXIS)
        self._inputs: dict[str, list[torch.Tensor]] = {}  # by group: inputs whose exchange is noted already
        self._gathers: dict[str, GatheredInput] = {}  # by group, where layers gather for themselves

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape that one rank holds."""
        dim = self.dims.get(parameter)
        return tuple(size // self._ranks if d == dim else size for d, size in enumerate(parameter.shape))

    @contextlib.contextmanager
    def running(self, log: SaveLog) -> Iterator[None]:
        """Give layers one rank's inputs and outputs in a forward pass inside, and note the collectives.

        Args:
            log: Grows with every tensor saved for backward.
        """
        self._traffic.begin(log)
        self._inputs = {}
        self._gathers = gathers_of(self._split, self._gather_of)
        hooks = []
        for layer in self._layers:
            if layer.style.name in EXPERTS:
                hooks.append(layer.module.register_forward_pre_hook(self._entering_experts(layer), with_kwargs=True))
            else:
                hooks.append(layer.module.register_forward_pre_hook(self._entering(layer), prepend=True))
            hooks.append(layer.module.register_forward_hook(self._leaving(layer)))
        hooks += self._summing_hooks()
        try:
            with adjusted(self._model, self._split.adjustments), self._other_forwards() as stack:
                hooks += [*self._token_hooks(stack), *self._forgetting_hooks()]
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._inputs = {}

    @contextlib.contextmanager
    def _other_forwards(self) -> Iterator[contextlib.ExitStack]:
        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                if _adds_bias_last(layer):
                    stack.enter_context(mock.patch.object(layer.module, "forward", self._adding_up(layer)))
                if layer.style is WIDE_NORM:
                    normed = norm_in_parts(layer.module, self._ranks, functools.partial(self._total, layer.path))
                    stack.enter_context(mock.patch.object(layer.module, "forward", normed))
                if self.stands_in and layer.style.name in EXPERTS:
                    stack.enter_context(mock.patch.object(layer.module, "forward", stand_in(layer.module)))
            yield stack

    def _token_hooks(self, stack: contextlib.ExitStack) -> list[Any]:
        """Register the twins of the hooks of ``let_exchange_tokens``; return their handles."""
        if self._sequence is None:
            return []
        hooks = self._token_wise.take_parts() if self._token_wise is not None else []
        for path in self._sequence.first:
            hooks.append(change_hidden_input(self._model.get_submodule(path), functools.partial(self._cut, path)))
        for path in self._sequence.last:
            gathered = functools.partial(self._gathered, path)
            hooks.append(change_hidden_output(self._model.get_submodule(path), gathered))
        groups = {layer.path: layer.group for layer in self._layers}
        for path in self._sequence.scopes:
            module = self._model.get_submodule(path)
            if is_linear(module):
                tokens, layers = self._gathers[groups[path]], [module]
            else:
                tokens, layers = self._gathers[path], linear_layers(module)
                around_all = functools.partial(on_all_tokens, tokens, module.forward)
                stack.enter_context(mock.patch.object(module, "forward", around_all))
            for layer in layers:
                around = functools.partial(tokens.around, layer.forward)
                stack.enter_context(mock.patch.object(layer, "forward", around))
        return hooks

    def _summing_hooks(self) -> list[Any]:
        """Let blocks note the sums of gradients of what they pass through one function."""
        paths = {module: path for path, module in self._model.named_modules() if module in self._summing}

        def enter(block: nn.Module, *_: Any) -> None:
            every = {parameters_of(module)[name] for module, name in self._summing[block]}
            num_bytes = sum(tensor_bytes(parameter) for parameter in every if parameter.requires_grad)
            if num_bytes:
                self._traffic.note("all_reduce", "backward", num_bytes, paths[block], self._modules_to(paths[block]))

        return [block.register_forward_pre_hook(enter) for block in self._summing]

    def _sum_gradients(self, layer: PlannedLayer, name: str) -> None:
        """Note the sum of a whole parameter's gradient, unless its block sums all of its own together."""
        parameter = parameters_of(layer.module)[name]
        if parameter is not None and parameter.requires_grad and (layer.module, name) not in self._together:
            self._note("all_reduce", "backward", parameter, layer.path)

    def _gather_of(self, path: str) -> GatheredInput:
        """Return the gather for the layers at a path, or in it."""

        def gathered(part: torch.Tensor, whole: torch.Tensor) -> None:
            self._note_beside("all_gather", "forward", whole, path)
            if part.requires_grad:
                self._note_beside("reduce_scatter", "backward", whole, path)

        def saved(num_bytes: int, begins: bool) -> None:
            around = self._modules_to(path.rpartition(".")[0])
            self._traffic.note("all_gather", "backward", num_bytes, path, around, beside=begins)

        return GatheredInput(self._axis, TOKENS_DIM, keeps=self._keeps, gathered=gathered, saved=saved)

    def _forgetting_hooks(self) -> list[Any]:
        """Let go of inputs of several layers as soon as the real twin does: they would be counted until the loss."""
        groups: dict[str, list[PlannedLayer]] = {}
        for layer in self._layers:
            if layer.style.gradient == "all_reduce" and layer.style.name not in EXPERTS:
                groups.setdefault(layer.group, []).append(layer)

        def forget(name: str, *_: Any) -> None:
            self._inputs.pop(name, None)
            if name in self._gathers:
                self._gathers[name].forget()

        holders = {name: each[0].parent if len(each) > 1 else each[0].module for name, each in groups.items()}
        return [each.register_forward_hook(functools.partial(forget, name)) for name, each in holders.items()]

    def _note(self, kind: CollectiveKind, moment: Moment, tensor: torch.Tensor, path: str) -> None:
        self._note_within(kind, moment, tensor, path, path)

    def _note_beside(self, kind: CollectiveKind, moment: Moment, tensor: torch.Tensor, path: str) -> None:
        """Note a collective before or behind the module at ``path``, which does not repeat it when it runs again."""
        self._note_within(kind, moment, tensor, path, path.rpartition(".")[0])

    def _note_within(self, kind: CollectiveKind, moment: Moment, tensor: torch.Tensor, path: str, around: str) -> None:
        self._traffic.note(kind, moment, tensor_bytes(tensor), path, self._modules_to(around))

    def _modules_to(self, path: str) -> list[nn.Module]:
        parts = path.split(".")
        return [self._model.get_submodule(".".join(parts[: depth + 1])) for depth in range(len(parts))]

    def _cut(self, path: str, hidden: torch.Tensor) -> torch.Tensor:
        check_tokens(hidden, self._ranks)
        if hidden.requires_grad:
            self._note_beside("all_gather", "backward", hidden, path)
        return self._axis.cut(hidden, TOKENS_DIM)

    def _gathered(self, path: str, hidden: torch.Tensor) -> torch.Tensor:
        def gather(part: torch.Tensor) -> torch.Tensor:
            whole = self._axis.gather(part, TOKENS_DIM)
            self._note_beside("all_gather", "forward", whole, path)
            return whole

        def share(parameter: torch.Tensor) -> torch.Tensor:
            if parameter.requires_grad:
                self._note_beside("all_reduce", "backward", parameter, path)
            return self._axis.copy(parameter)

        return gathered_over(self._axis, hidden, share, gather)

    def _scattered(self, layer: PlannedLayer, output: torch.Tensor) -> torch.Tensor:
        self._note("reduce_scatter", "forward", output, layer.path)
        self._note("all_gather", "backward", output, layer.path)
        self._sum_gradients(layer, "bias")
        tokens = gather_around(layer.path, self._gathers)
        return self._axis.scatter_tokens(output if tokens is None else tokens.behind(output), TOKENS_DIM)

    def _total(self, path: str, part: torch.Tensor) -> torch.Tensor:
        self._note("all_reduce", "forward", part, path)
        if part.requires_grad:
            self._note("all_reduce", "backward", part, path)
        return self._axis.total(part)

    def boundaries(self, model: nn.Module, log: SaveLog) -> tuple[Boundary, ...]:
        """Return the collectives of the last run in one micro-batch."""
        return self._traffic.boundaries()

    def _entering(self, layer: PlannedLayer) -> Callable[..., tuple[Any, ...]]:
        style = layer.style

        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if style.name == "replicated_with_grad_allreduce":
                for name in parameters_of(module):
                    self._sum_gradients(layer, name)
            if style.gradient == "nothing":
                return args
            if self._sequence is not None and self._sequence.gathers_above(layer.path):
                return args
            tensor, *others = args
            if self._sequence is not None and layer.path in self._sequence.scopes:
                return (self._gathered_once(layer, tensor), *others)
            tensor = self._shared(layer, tensor)
            return (tensor.chunk(self._ranks, -1)[0] if style.splits_input else tensor, *others)

        return enter

    def _entering_experts(self, layer: PlannedLayer) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    self._note("all_reduce", "backward", leaf, layer.path)

        return enter

    def _shared(self, layer: PlannedLayer, tensor: torch.Tensor) -> torch.Tensor:
        """Return the input of several layers, whose gradients are summed or gathered once."""
        known = self._inputs.setdefault(layer.group, [])
        for before, shared in zip(known[::2], known[1::2], strict=True):
            if before is tensor:
                return shared
        kind = layer.style.gradient
        shared = as_products(tensor) if kind == "all_reduce" else tensor
        if tensor.requires_grad and kind != "nothing":
            known += [tensor, shared]
            self._note(kind, "backward", shared, layer.path)
        return shared

    def _gathered_once(self, layer: PlannedLayer, tensor: torch.Tensor) -> torch.Tensor:
        """Gather the tokens of an input, once for all layers that take it."""
        known = self._inputs.setdefault(layer.group, [])
        for before, whole in itertools.pairwise(known):
            if before is tensor:
                return whole
        whole = self._gathers[layer.group].gather(tensor)
        self._inputs[layer.group] = [tensor, whole]
        return whole

    def _leaving(self, layer: PlannedLayer) -> Callable[..., Any]:
        return (lambda module, args, output: output) if _adds_bias_last(layer) else self._left(layer)

    def _left(self, layer: PlannedLayer) -> Callable[..., Any]:
        style = layer.style

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            if style.name == LATENT:
                return self._sharing_key(layer, output)
            if style.output == "as computed":
                return output
            if style.output == "logits":
                return logits_in_parts(output, self._vocabulary(output))
            if style.name == "rowwise" and self._sequence is not None and self._sequence.covers(layer.path):
                return self._scattered(layer, output)
            whole = torch.cat([output] * self._ranks, -1) if style.output == "all_gather" else output
            self._note(style.output, "forward", whole, layer.path)
            return whole

        return leave

    def _sharing_key(self, layer: PlannedLayer, latent: torch.Tensor) -> torch.Tensor:
        features = rotated_features(layer)
        if latent.requires_grad:
            self._note("all_reduce", "backward", latent[..., :features], layer.path)
        return share_key(latent, features, self._axis)

    def _adding_up(self, layer: PlannedLayer) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the forward of a layer split by rows, whose bias is added to the sum over the ranks."""
        module, forward, leave = layer.module, layer.module.forward, self._left(layer)

        def summed(features: torch.Tensor) -> torch.Tensor:
            bias = parameters_of(module)["bias"]
            assert bias is not None
            with swapped_parameters(module, {"bias": torch.zeros_like(bias) if is_transposed(module) else None}):
                output = forward(features)
            whole: torch.Tensor = leave(module, features, output)
            return whole + bias.to(whole.dtype)

        return summed

    def _vocabulary(self, part: torch.Tensor) -> Vocabulary:
        """Return a vocabulary that notes what cross entropy, or other use of the whole logits, would send."""

        # The loss is outside the model, which is then counted as if it were all recomputed.
        def note(kind: CollectiveKind, tensor: torch.Tensor) -> None:
            self._traffic.note(kind, "forward", tensor_bytes(tensor), "", [self._model], saves_before=0)

        def reduced(numbers: torch.Tensor) -> torch.Tensor:
            note("all_reduce", numbers)
            return numbers.clone()

        def gathered(part: torch.Tensor) -> torch.Tensor:
            whole = torch.cat([part] * self._ranks, -1)
            note("all_gather", whole)
            return whole

        return Vocabulary(0, part.shape[-1] * self._ranks, reduced, reduced, gathered)


def _adds_bias_last(layer: PlannedLayer) -> bool:
    """Return whether the layer's bias is added to the sum over the ranks, and not in the layer itself."""
    return layer.style.output == "all_reduce" and parameters_of(layer.module).get("bias") is not None


# --- The method

AXIS: Final = "tensor"
_HALF_BYTES = 2

# Keys of ATorch's tracer and solver, for which a plan is enough here.
# ATorch's tracer and planner.
_FOREIGN = dict.fromkeys(
    ("shard_planner", "tp_ranks", "replacement_map", "leaf_modules", "prop_mode", "use_fake_mode", "tracer_backend"),
    "leave it out; the number of ranks is the size of the axis 'tensor' in parallel_mode",
)


def _pairs(value: Any) -> Any:
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


class TensorParallel(Method):
    """Splits linear layers in pairs, by columns and by rows, and the vocabulary (Shoeybi et al. 2019, §3).

    A plan says which layers: the model's own (transformers' ``base_model_tp_plan``), or one found in the data flow of
    its blocks and proved on each kind of block. The ranks of a tensor group take the same samples. Seed: ATorch.

    Config: None, or ``{"plan": {name pattern: style}}`` to give a plan, or to override entries of the model's own.
    ``*`` in a pattern stands for one part of a name. Styles: ``colwise``, ``colwise_gather_output``, ``rowwise``,
    ``rowwise_split_input``, ``embedding_rowwise``, ``embedding_colwise``, ``vocabulary_head``,
    ``replicated_with_grad_allreduce``, ``experts``, ``replicate``. ``"sequence": True`` lets each rank
    keep a part of the tokens between the split layers of blocks (Korthikanti et al. 2022). Layers split by columns
    then save that part alone and gather it again in backward; ``"keep_gathered": True`` saves all tokens.
    """

    method_name: ClassVar[str] = "tensor_parallel"
    phase: ClassVar[Phase] = Phase.TENSOR
    summary: ClassVar[str] = "splits the layers themselves over the tensor axis"
    effect: ClassVar[str] = (
        "memory: split layers / n. Time: products / n. Communication: an all-reduce of activations per pair and pass"
    )
    seed_name: ClassVar[str | None] = "ATorch: tensor_parallel"
    axis: ClassVar[str | None] = AXIS
    foreign_keys: ClassVar[Mapping[str, str]] = _FOREIGN

    sequence: bool = False
    keep_gathered: bool = False
    plan: Annotated[tuple[tuple[str, str], ...], BeforeValidator(_pairs)] = ()

    def model_post_init(self, _: Any) -> None:
        """Refuse to keep what is not gathered."""
        if self.keep_gathered and not self.sequence:
            raise StrategyError(
                "tensor_parallel: keep_gathered is about tokens that are gathered, and every rank has all of them",
                expected="keep_gathered with sequence=True",
                got="keep_gathered=True alone",
                fix="leave it out, or add sequence=True",
            )

    @classmethod
    def search_options(cls, scope: SearchScope) -> tuple[Self, ...]:
        """Try it without and with dividing the tokens between the layers, which adapters need whole."""
        if scope.model is not None and any(map(is_adapted, scope.model.modules())):
            return (cls.parse(None),)
        return cls.parse(None), cls.parse({"sequence": True})

    @classmethod
    def axis_sizes(cls, divisors: Sequence[int], node: int) -> tuple[int, ...]:
        """Stay within a node: layers wait for every collective."""
        return within_node(divisors, node)

    @property
    def surcharge(self) -> float:
        """Ask a little: every layer has its collectives, on the fastest links."""
        return 0.01

    @property
    def divides_between_layers(self) -> bool:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        return self.sequence

    @property
    def keeps_gathered(self) -> bool:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        return self.keep_gathered

    def check_experts(self, sizes: Mapping[str, int]) -> None:
        """See :class:`~meshwright.methods.base.Method`."""
        if self.sequence and not self.plan and sizes.get(AXIS, 1) > 1 and sizes.get("expert", 1) == 1:
            raise needs_undivided_experts("stacked experts")

    def traced_layers(
        self, model: nn.Module, sizes: Mapping[str, int], sample: SampleRun | None, strategy: Strategy
    ) -> SplitTrace | None:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        ranks = sizes.get(AXIS, 1)
        if ranks == 1:
            return None
        return SplitTrace(model, self._split(model, sizes, sample, strategy), ranks, **_manner(strategy))

    def text_arguments(self) -> dict[str, Any]:
        """Print the plan as a dictionary."""
        plan = {"plan": dict(self.plan)} if self.plan else {}
        sequence = {"sequence": True} if self.sequence else {}
        return plan | sequence | ({"keep_gathered": True} if self.keep_gathered else {})

    def split(
        self,
        model: nn.Module,
        ranks: int,
        sample: SampleRun | None = None,
        apart: Sequence[str] = (),
        beside: Sequence[str] = (),
    ) -> Split:
        """Return the split of a model over ``ranks`` ranks, without changing the model.

        Args:
            model: A plain module.
            ranks: Size of the axis.
            sample: Runs a model that brings no plan, to find one in its data flow.
            apart: Paths of the experts that another method divides.
            beside: Paths of modules that run with these experts and are not tried with the others.

        Raises:
            ModelError: When the model cannot be split, with the reason.
            StrategyError: When the config's plan names nothing in the model.
        """
        return split_of(model, dict(self.plan), ranks, sample, sequence=self.sequence, apart=apart, beside=beside)

    def _split(self, model: nn.Module, sizes: Mapping[str, int], sample: SampleRun | None, strategy: Strategy) -> Split:
        """Return the split of a model beside the experts that another method divides."""
        ranks, method = sizes.get(AXIS, 1), strategy.get("expert_parallel")
        experts = method.traced_layers(model, sizes, sample, strategy) if isinstance(method, Method) else None
        if experts is None:
            return self.split(model, ranks, sample)
        with experts.flowing():
            return self.split(model, ranks, sample, experts.paths, experts.beside)

    def layers(self, model: nn.Module, ranks: int, sample: SampleRun | None = None) -> list[PlannedLayer]:
        """Return the layers of :meth:`split`."""
        return list(self.split(model, ranks, sample).layers)

    def check(self, job: Job) -> None:
        """Refuse models that cannot be split, and plans that the model or the axis cannot follow."""
        if job.size(AXIS) > 1 and self.sequence:
            refuse_router_loss(job.model, "tensor_parallel with sequence=True")
        if job.size(AXIS) > 1 or self.plan:
            split = self._split(job.model, dict(job.axes), job.sample, job.strategy)
            if "half" in job.strategy:
                check_grouped(split.layers, job.size(AXIS), _HALF_BYTES)
            # Stored for apply, where a pipeline has left this rank with a part of the model.
            job.split = split, split.summary(job.model, job.size(AXIS))

    def apply(self, job: Job) -> None:
        """Split the layers; the rest of the model stays whole on every rank."""
        if job.size(AXIS) == 1:
            return
        assert job.split is not None, "check has found it"
        split, summary = job.split
        if job.pipeline is not None:
            split = split.of_part(job.model)
        check_equal("The split of the layers", summary, "give every rank the same model and the same kind of samples")
        job.notices.append(summary)
        axis = TensorAxis(job.require_mesh()[AXIS])
        split_layers(job.model, split, axis, job.device, **_manner(job.strategy))
        split.adjust(job.model)
        job.split = None  # it would keep the blocks of other pipeline ranks alive
        job.is_split = True
        if job.shard_axis is None:
            move_to(job.model, job.device)

    def cost(self, step: Step) -> Step:
        """Divide the parameters and everything that depends on them, and add the collectives around split layers."""
        ranks = step.size(AXIS)
        if ranks == 1:
            return step
        step = step.replace(blocks=tuple(_divided(block, ranks) for block in step.blocks))
        return send_boundaries(step, AXIS)


def _manner(strategy: Strategy) -> dict[str, bool]:
    """Return how a strategy exchanges. See [Note: gathered inputs] and [Note: gradients summed together]."""
    methods = [method for method in strategy.methods if isinstance(method, Method)]
    return {
        "keeps_gathered": any(method.keeps_gathered for method in methods),
        "sums_together": not any(method.splits_backward for method in methods),
    }


def _divided(block: Block, ranks: int) -> Block:
    return dataclasses.replace(block, parameters=tuple(_part(parameter, ranks) for parameter in block.parameters))


def _part(parameter: Parameter, ranks: int) -> Parameter:
    dim = parameter.tensor_dim
    if dim is None:  # most are divided experts, of which there may be hundreds
        return parameter
    shape = tuple(size // ranks if d == dim else size for d, size in enumerate(parameter.shape))
    return dataclasses.replace(parameter, shape=shape)
