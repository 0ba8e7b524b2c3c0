"""Divide experts over the axis, after a trial has shown that the parts compute the same."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from meshwright.errors import ModelError
from meshwright.methods.expert.balance import ExpertLoad
from meshwright.methods.expert.dispatch import ExpertAxis, StackedDispatch, run_rows
from meshwright.methods.expert.expert_layers import ExpertLayer, ListedExperts, StackedExperts
from meshwright.methods.expert.listed_dispatch import (
    DividedExperts,
    ListedDispatch,
    answered_by,
    answering,
    changed_input,
    check_answer,
    preserved_buffers,
    questions_of,
)
from meshwright.methods.tensor.block_trials import evaluating, reason_of
from meshwright.methods.tensor.split_layers import swapped_parameters
from meshwright.nn import move_to, wrap_method
from meshwright.optim import Stages
from meshwright.runtime import preserved_rng
from meshwright.runtime.torch_internals.modules import children_of
from meshwright.runtime.torch_internals.tensors import version_of


@dataclass
class Experts:
    """This rank's experts, for the methods that shard and average."""

    axis: ExpertAxis
    modules: list[nn.Module] = field(default_factory=list)  # with stacked parameters, or in place of lists
    dispatches: list[StackedDispatch] = field(default_factory=list)

    def parameters(self) -> set[nn.Parameter]:
        """Return the parameters of this rank's experts."""
        return {parameter for module in self.modules for parameter in module.parameters()}

    def inside(self) -> set[nn.Module]:
        """Return the modules of experts and all modules in them."""
        return {each for module in self.modules for each in module.modules()}

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Set the dtype in which unsharded weights compute."""
        for dispatch in self.dispatches:
            dispatch.compute_dtype = dtype
        for module in self.modules:
            if isinstance(module, DividedExperts):
                module.compute_dtype = dtype

    def run_always(self) -> None:
        """Run experts without tokens, too, so that their gradients are zeros instead of missing."""
        for module in self.modules:
            if isinstance(module, DividedExperts):
                module.run_always = True

    def beside(self, stages: Stages | None, device: torch.device) -> Stages | None:
        """Return how to sum norms, over the stages of a pipeline and the ranks that hold listed experts of their own.

        Args:
            stages: Those of a pipeline; None without one.
            device: Device of the sums.
        """
        listed = [module for module in self.modules if isinstance(module, DividedExperts)]
        if not listed:  # all are DTensors
            return stages
        own = frozenset(parameter for module in listed for parameter in module.parameters())
        return dataclasses.replace(stages or Stages(device), experts=own, expert_group=self.axis.group)


def divide(
    layers: Sequence[tuple[ExpertLayer, int | None]], axis: ExpertAxis, device: torch.device, load: ExpertLoad
) -> Experts:
    """Reduce experts to this rank's part, in place, and let layers send tokens to them. Collective.

    Args:
        layers: The layers to divide, each with the features of its rows if known; in a plain module on ``device`` or
            the CPU, with the same values on every rank.
        axis: The ranks that divide them.
        device: Device of the experts; only this rank's part is ever there.
        load: Counts the tokens of listed experts, which are known where they are sent.
    """
    experts = Experts(axis)
    for layer, features in layers:
        if isinstance(layer, StackedExperts):
            _divide_stack(layer, experts, device)
        else:
            _divide_list(layer, experts, features, device, load)
    return experts


def _divide_stack(layer: StackedExperts, experts: Experts, device: torch.device) -> None:
    axis, module = experts.axis, layer.module
    per_rank = layer.num_experts // axis.size
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = parameter.detach().narrow(0, axis.index * per_rank, per_rank).clone()
        part = part if part.is_meta else part.to(device)
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


def _divide_list(
    layer: ListedExperts, experts: Experts, features: int | None, device: torch.device, load: ExpertLoad
) -> None:
    axis, per_rank = experts.axis, layer.num_experts // experts.axis.size
    divided = DividedExperts(layer.experts, range(axis.index * per_rank, (axis.index + 1) * per_rank))
    move_to(divided, device)
    setattr(layer.block, layer.name, divided)
    wrap_method(layer.block, "forward", ListedDispatch(layer.block, divided, axis, features, load.watch(layer)))
    experts.modules.append(divided)


# --- Trying a layer in parts, on a few random tokens
#
# Experts that see each other's tokens or use weights other than as factors, and blocks that do more with their list
# than call its items, would train wrongly if divided: they are refused. The layer is not changed.

_TOKENS = 4
_HALF = (torch.float16, torch.bfloat16)


def prove(layer: ExpertLayer, ranks: int) -> tuple[int, float] | None:
    """Compare a layer with the sum of its parts.

    Returns:
        Features of a row, and rows that experts get per token; None for stacked experts that are told which tokens are
        theirs, and if the block of others does not take one tensor, so that nothing was tried.

    Raises:
        ModelError: When parts do not compute what the whole does.
    """
    with torch.no_grad(), preserved_rng():
        torch.manual_seed(0)
        if isinstance(layer, StackedExperts):
            with _with_values(layer.block if layer.takes_rows else layer.module):
                if layer.takes_rows:
                    return _prove_rows(layer, ranks)
                _prove_stacked(layer, ranks)
            return None
        with _with_values(layer.block):
            return _prove_listed(layer)


@contextlib.contextmanager
def _with_values(module: nn.Module) -> Iterator[None]:
    """Give the parameters of a module on meta memory and random values inside the context."""
    with contextlib.ExitStack() as stack:
        for each in module.modules():
            on_meta = [(name, p) for name, p in each.named_parameters(recurse=False) if p.is_meta]
            values = {name: nn.Parameter(_random(p), p.requires_grad) for name, p in on_meta}
            stack.enter_context(swapped_parameters(each, dict(values)))
        yield


_DRAWN, _APART = 2**20 + 7, 1009  # neither divides widths that models have


def _random(parameter: torch.Tensor) -> torch.Tensor:
    """Return values for a parameter on meta.

    Real experts have billions: a million is drawn and repeated, and matrices of a stack begin a little further each in
    the same memory.
    """
    shape, matrix = tuple(parameter.shape), math.prod(parameter.shape[-2:])
    size = matrix + _APART * (math.prod(shape[:-2]) - 1)
    drawn = torch.randn(min(max(size, 1), _DRAWN), dtype=parameter.dtype) / 8
    strides = [_APART * math.prod(shape[place + 1 : -2]) for place in range(len(shape) - 2)]
    inner = torch.empty(shape[-2:], device="meta").stride()
    return drawn.repeat(-(-size // len(drawn))).as_strided(shape, (*strides, *inner))


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
        got=reason_of(last) if last is not None else "no parameters of three dims",
        fix="give a module of stacked experts such a forward; for example transformers' MixtralExperts",
    )


def _sizes(layer: StackedExperts) -> list[int]:
    """Return candidates for the number of features, likeliest first."""
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
    """Return the weighted sum of what ranks compute, each with its part of the experts."""
    total = torch.zeros_like(hidden)
    for rank in (index // per_rank).unique().tolist():
        token, place = (index // per_rank == rank).nonzero(as_tuple=True)
        part = {name: weight.narrow(0, rank * per_rank, per_rank) for name, weight in weights.items()}
        with swapped_parameters(layer.module, dict(part)), _counting(layer, per_rank):
            own = index[token, place] - rank * per_rank
            rows = run_rows(layer, layer.module.forward, hidden[token], own, per_rank, len(own))
        total.index_add_(0, token, (rows * factors[token, place, None]).to(total.dtype))
    return total


def _prove_rows(layer: StackedExperts, ranks: int) -> tuple[int, float] | None:
    """Prove experts that take rows: those of zeros must count nothing, neither in answers nor in gradients."""
    module, per_rank = layer.module, layer.num_experts // ranks
    weights = dict(module.named_parameters(recurse=False))
    like = next(weight for weight in weights.values() if weight.dim() == 3)
    every = torch.arange(layer.num_experts, device=like.device).repeat_interleave(_TOKENS)
    last: Exception | None = None
    for features in _sizes(layer):
        rows = torch.randn(len(every), features, device=like.device, dtype=like.dtype)
        nothing = torch.zeros_like(rows).requires_grad_()
        try:
            whole = module(rows)
            with torch.enable_grad():
                silent = module(nothing)
                (slope,) = torch.autograd.grad(silent.sum(), nothing)
        except Exception as error:  # the wrong number of features, or arguments of another meaning
            last = error
            continue
        if silent.any() or slope.any():
            raise _not_in_parts(layer.path, "experts that answer rows of zeros, which are not sent")
        parts = _sum_of_parts(layer, weights, rows, every[:, None], torch.ones_like(rows[:, :1]), per_rank)
        _compare(layer.path, parts, whole)
        return features, _rows_per_token(layer, features, like)
    raise ModelError(
        f"expert_parallel: {layer.path} cannot be called as experts are",
        expected="rows (experts · T, H), first those of the first expert",
        got=reason_of(last) if last is not None else "no parameters of three dims",
        fix="give a module of stacked experts such a forward, or one with tokens, their experts and weights",
    )


def _rows_per_token(layer: StackedExperts, features: int, like: torch.Tensor) -> float:
    """Return how many rows that are no zeros a block gives its experts; as many as experts if it cannot be tried."""
    given: list[torch.Tensor] = []
    hook = layer.module.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    try:
        with evaluating(layer.block), torch.no_grad():
            layer.block(torch.randn(1, _TOKENS, features, device=like.device, dtype=like.dtype))
    except Exception:  # it takes other arguments
        return float(layer.num_experts)
    finally:
        hook.remove()
    return (given[0] != 0).any(-1).sum().item() / _TOKENS if given else float(layer.num_experts)


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
    with evaluating(block), torch.no_grad(), preserved_buffers(block):
        for shape in ((1, _TOKENS), (_TOKENS,)):
            hidden = torch.randn(*shape, _features(experts), device=like.device, dtype=like.dtype)
            try:
                with preserved_rng():
                    whole = block(hidden)
            except Exception:  # it takes other arguments: only a training step can show what it asks
                continue
            return _compare_listed(layer, hidden, whole)
    return None


def _features(experts: nn.ModuleList) -> int:
    """Return the input features of an expert's first layer; if the guess is wrong, the block will raise."""
    return next(p for p in experts.parameters() if p.dim() > 1).shape[-1]


def _compare_listed(layer: ListedExperts, hidden: torch.Tensor, whole: Any) -> tuple[int, float]:
    block, experts = layer.block, layer.experts
    stand_in = DividedExperts(experts, range(0))
    children_of(block)[layer.name] = stand_in
    try:
        before = version_of(hidden)
        asked = questions_of(block, stand_in, lambda: block(hidden))
        if version_of(hidden) != before:
            raise changed_input(block)
        answers = [experts[number](given) for number, given in asked]
        for (number, given), answer in zip(asked, answers, strict=True):
            check_answer(number, given, answer)
        with answered_by(stand_in, answering(asked, answers)):
            parts = block(hidden)
    except ModelError:
        raise
    except Exception as error:
        raise _not_in_parts(layer.path, reason_of(error)) from error
    finally:
        children_of(block)[layer.name] = experts
    _compare(layer.path, _tensor(parts), _tensor(whole))
    rows = sum(given.numel() // given.shape[-1] for _, given in asked)
    return (asked[0][1].shape[-1] if asked else hidden.shape[-1]), rows / _TOKENS


def _tensor(output: Any) -> torch.Tensor:
    """Return the first tensor of a block's output."""
    while not isinstance(output, torch.Tensor):
        output = output[0] if isinstance(output, tuple | list) else next(iter(output.values()))
    return output


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
