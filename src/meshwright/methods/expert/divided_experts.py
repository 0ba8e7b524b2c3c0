"""Divide experts over the axis, once a trial has shown that the parts compute the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.errors import ModelError
from meshwright.methods.expert.dispatch import (
    DividedExperts,
    ExpertAxis,
    Hear,
    ListedDispatch,
    StackedDispatch,
    answering,
    changed_input,
    check_answer,
    preserved_buffers,
    questions_of,
    run_rows,
)
from meshwright.methods.expert.expert_layers import ExpertLayer, ListedExperts, StackedExperts
from meshwright.methods.gradient_averaging import broadcast_states
from meshwright.methods.tensor.split_layers import swapped_parameters
from meshwright.nn import wrap_method
from meshwright.optim import Stages
from meshwright.runtime import preserved_rng


@dataclass
class Experts:
    """The experts of this rank, as methods that shard and average see them."""

    axis: ExpertAxis
    modules: list[nn.Module] = field(default_factory=list)  # of stacked parameters, and in the places of lists
    dispatches: list[StackedDispatch] = field(default_factory=list)

    def parameters(self) -> set[nn.Parameter]:
        """This rank's part of all experts."""
        return {parameter for module in self.modules for parameter in module.parameters()}

    def inside(self) -> set[nn.Module]:
        """Return the modules of experts and all in them."""
        return {each for module in self.modules for each in module.modules()}

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Set the precision in which weights compute that nobody gathers."""
        for dispatch in self.dispatches:
            dispatch.compute_dtype = dtype
        for module in self.modules:
            if isinstance(module, DividedExperts):
                module.compute_dtype = dtype

    def run_always(self) -> None:
        """Let experts run that no token was sent to: their gradients are then zeros, where none would be missed."""
        for module in self.modules:
            if isinstance(module, DividedExperts):
                module.run_always = True

    def stages(self, model: nn.Module, device: torch.device) -> Stages | None:
        """For norms, where ranks hold experts under names of their own; None where all experts are DTensors."""
        listed = [module for module in self.modules if isinstance(module, DividedExperts)]
        if not listed:
            return None
        own = {parameter for module in listed for parameter in module.parameters()}
        alike = frozenset(parameter for parameter in model.parameters() if parameter not in own)
        return Stages(self.axis.group, device, frozenset(), alike)


def divide(
    model: nn.Module, layers: Sequence[tuple[ExpertLayer, int | None]], mesh: DeviceMesh, device: torch.device
) -> Experts:
    """Leave each rank its part of the experts, in place, and let layers send tokens to them. Collective.

    Args:
        model: A plain module, on ``device`` or the CPU; rank 0's values are taken over first.
        layers: What to divide, each with the features that a row of it is known to have.
        mesh: The axis.
        device: Where experts go; only this rank's part is ever there.
    """
    broadcast_states(model, device)
    experts = Experts(ExpertAxis(mesh))
    for layer, features in layers:
        if isinstance(layer, StackedExperts):
            _divide_stack(layer, experts, device)
        else:
            _divide_list(layer, experts, features, device)
    return experts


def _divide_stack(layer: StackedExperts, experts: Experts, device: torch.device) -> None:
    axis, module = experts.axis, layer.module
    per_rank = layer.num_experts // axis.size
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = parameter.detach().narrow(0, axis.index * per_rank, per_rank).clone().to(device)
        shard: DTensor = DTensor.from_local(
            part, axis.mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        setattr(module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    for name in layer.counters:
        setattr(module, name, per_rank)
    dispatch = StackedDispatch(layer, axis)
    wrap_method(module, "forward", dispatch)
    experts.modules.append(module)
    experts.dispatches.append(dispatch)


def _divide_list(layer: ListedExperts, experts: Experts, features: int | None, device: torch.device) -> None:
    axis, per_rank = experts.axis, layer.num_experts // experts.axis.size
    divided = DividedExperts(layer.experts, range(axis.index * per_rank, (axis.index + 1) * per_rank))
    setattr(layer.block, layer.name, divided.to(device))
    wrap_method(layer.block, "forward", ListedDispatch(layer.block, divided, axis, features))
    experts.modules.append(divided)


# --- Trying out, on a few random tokens, that a layer of experts computes the same in parts; nothing is changed.
#
# Experts that see each other's tokens, that use weights otherwise than as factors, or a block that does more with its
# list than call it, would train wrongly when divided: they are refused.

_TOKENS = 4
_HALF = (torch.float16, torch.bfloat16)


def prove(layer: ExpertLayer, ranks: int) -> tuple[int, float] | None:
    """Run a layer whole and in parts.

    Returns:
        For a list: features of a row, and rows that experts are given per token; None where the block is not called
        with one tensor, and nothing was tried.

    Raises:
        ModelError: When parts do not compute what the whole does.
    """
    with torch.no_grad(), preserved_rng():
        torch.manual_seed(0)
        if isinstance(layer, StackedExperts):
            _prove_stacked(layer, ranks)
            return None
        return _prove_listed(layer)


def _prove_stacked(layer: StackedExperts, ranks: int) -> None:
    module, per_rank = layer.module, layer.num_experts // ranks
    weights = dict(module.named_parameters(recurse=False))
    like = next(weight for weight in weights.values() if weight.dim() == 3)
    experts = torch.tensor(sorted({0, per_rank - 1, layer.num_experts - per_rank, layer.num_experts - 1}))
    index = torch.stack([experts.roll(token)[: min(2, len(experts))] for token in range(_TOKENS)]).to(like.device)
    factors = torch.rand(index.shape, device=like.device, dtype=like.dtype)
    last: Exception | None = None
    for features in _sizes(layer):
        hidden = torch.randn(_TOKENS, features, device=like.device, dtype=like.dtype)
        try:
            whole = module(hidden, index, factors)
        except Exception as error:  # the wrong number of features, or another order of arguments
            last = error
            continue
        _compare(layer.path, _sum_of_parts(layer, weights, hidden, index, factors, per_rank), whole)
        return
    raise ModelError(
        f"expert_parallel: {layer.path} cannot be called as experts are",
        expected="tokens (T, H), the experts of each (T, k) and their weights (T, k)",
        got=f"{type(last).__name__}: {(str(last).splitlines() or [''])[0][:120]}",
        fix="give a module of stacked experts such a forward; for example transformers' MixtralExperts",
    )


def _sizes(layer: StackedExperts) -> list[int]:
    """Return what the number of features may be, most likely first."""
    named = [getattr(layer.module, name, None) for name in ("hidden_dim", "hidden_size")]
    sizes = [size for p in layer.module.parameters() if p.dim() == 3 for size in p.shape[1:]]
    return list(dict.fromkeys([*(size for size in named if isinstance(size, int)), *sizes]))


def _sum_of_parts(
    layer: StackedExperts,
    weights: dict[str, nn.Parameter],
    hidden: torch.Tensor,
    index: torch.Tensor,
    factors: torch.Tensor,
    per_rank: int,
) -> torch.Tensor:
    """Return what ranks compute, each with its part of the experts, weighted and added up."""
    total = torch.zeros_like(hidden)
    for rank in (index // per_rank).unique().tolist():
        token, place = (index // per_rank == rank).nonzero(as_tuple=True)
        part = {name: weight.narrow(0, rank * per_rank, per_rank) for name, weight in weights.items()}
        with swapped_parameters(layer.module, dict(part)), _counting(layer, per_rank):
            rows = run_rows(layer.module.forward, hidden[token], index[token, place] - rank * per_rank)
        total.index_add_(0, token, (rows * factors[token, place, None]).to(total.dtype))
    return total


@contextlib.contextmanager
def _counting(layer: StackedExperts, number: int) -> Iterator[None]:
    for name in layer.counters:
        setattr(layer.module, name, number)
    try:
        yield
    finally:
        for name in layer.counters:
            setattr(layer.module, name, layer.num_experts)


def _prove_listed(layer: ListedExperts) -> tuple[int, float] | None:
    block, experts = layer.block, layer.experts
    like = next(experts.parameters())
    with _evaluating(block), preserved_buffers(block):
        for shape in ((1, _TOKENS), (_TOKENS,)):
            hidden = torch.randn(*shape, _features(experts), device=like.device, dtype=like.dtype)
            try:
                with preserved_rng():
                    whole = block(hidden)
            except Exception:  # it takes other arguments; the first step will show what it asks
                continue
            return _compare_listed(layer, hidden, whole)
    return None


def _features(experts: nn.ModuleList) -> int:
    """Return what the first layer of an expert takes; where it is transposed or else, the block will refuse it."""
    return next(p for p in experts.parameters() if p.dim() > 1).shape[-1]


def _compare_listed(layer: ListedExperts, hidden: torch.Tensor, whole: Any) -> tuple[int, float]:
    block, experts = layer.block, layer.experts
    stand_in = DividedExperts(experts, range(0))

    def listen(hear: Hear | None) -> None:
        stand_in.hear = hear

    block._modules[layer.name] = stand_in
    try:
        before = hidden._version
        asked = questions_of(block, lambda: block(hidden), listen)
        if hidden._version != before:
            raise changed_input(block)
        answers = [experts[number](given) for number, given in asked]
        for (number, given), answer in zip(asked, answers, strict=True):
            check_answer(number, given, answer)
        listen(answering(asked, answers))
        parts = block(hidden)
    except ModelError:
        raise
    except Exception as error:
        raise _not_in_parts(layer.path, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
    finally:
        block._modules[layer.name] = experts
    _compare(layer.path, _tensor(parts), _tensor(whole))
    rows = sum(given.numel() // given.shape[-1] for _, given in asked)
    return (asked[0][1].shape[-1] if asked else hidden.shape[-1]), rows / _TOKENS


def _tensor(output: Any) -> torch.Tensor:
    """Return the first tensor of what a block returns."""
    while not isinstance(output, torch.Tensor):
        output = output[0] if isinstance(output, tuple | list) else next(iter(output.values()))
    return output


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules()]
    module.eval()  # dropout would draw in another order
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode


def _compare(path: str, parts: torch.Tensor, whole: torch.Tensor) -> None:
    tolerance = 5e-2 if whole.dtype in _HALF else 1e-4
    apart = (parts.float() - whole.float()).norm() / whole.float().norm().clamp(min=1e-30)
    if not apart < tolerance:
        raise _not_in_parts(path, f"a difference of {apart.item():.1e}, relative")


def _not_in_parts(path: str, got: str) -> ModelError:
    return ModelError(
        f"expert_parallel: {path or 'the model'} does not compute the same when its experts are divided",
        expected="experts that work on each token alone, whose answers are multiplied by weights and added; and a "
        "block that only calls them, with inputs that do not depend on answers",
        got=got,
        fix="name the lists that hold experts with the key experts, or leave the method out",
    )
