"""Dispatch tokens to the ranks of their experts and back, for stacked and listed experts.

[Note: asking twice]
Stacked experts are called with tokens and indices, so their tokens can be sorted, sent, computed and returned. A block
that loops over a list of experts decides in its own code what each of them gets: what it asks expert 3 is known only
after expert 2 has answered, unless the answers do not matter. So its forward runs twice. In the first run answers are
zeros, and what is asked of every expert is noted. All questions travel in one exchange, this rank's experts answer
those of all ranks, and the second run gets the answers. Random draws and buffers are the same in both runs; a trial
before training (``divided_experts.py``) refuses blocks whose questions depend on answers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import ModelError
from meshwright.methods.expert.expert_layers import StackedExperts
from meshwright.methods.tensor.axis_exchange import TensorAxis, TracedAxis
from meshwright.methods.tensor.split_layers import local, swapped_parameters
from meshwright.runtime import preserved_rng
from meshwright.runtime.torch_internals.autograd import Function
from meshwright.runtime.torch_internals.pytree import tree_flatten, tree_leaves, tree_unflatten
from meshwright.runtime.torch_internals.tensors import version_of


class ExpertAxis:
    """The ranks that divide one layer's experts; each sends tokens of its own.

    Gradients of experts are sums over the tokens of all these ranks, while those of other parameters are averaged over
    the ``expert`` axis later. So gradients that enter the experts' backward are divided by its size, and those that
    leave it towards the tokens are multiplied by it: averaging over the other data ranks then gives experts the mean
    over all ranks, too.

    [Note: experts beside a tensor axis] The ranks of a tensor axis have equal tokens. Each sends an equal part of them,
    and the answers are gathered, so that experts are divided over both axes. Splitting every expert's features over the
    tensor axis instead, as its other layers are, would send each token from each of these ranks, and sum answers where
    this gathers them. A rank would have as many bytes of experts, in thinner matrices. Where a tensor axis divides the
    tokens between its layers (``sequence=True``), its ranks have different ones, and send them all.

    Args:
        mesh: A mesh of one axis: ``expert``, or that of ``expert`` and ``tensor`` together.
        num_averaged: Size of the ``expert`` axis.
        tensor: The ranks with equal tokens; None if all have different ones.
    """

    def __init__(self, mesh: DeviceMesh, num_averaged: int, tensor: TensorAxis | None = None) -> None:
        self.mesh, self._num_averaged, self._tensor = mesh, num_averaged, tensor
        self.group = mesh.get_group()
        self.index, self.size = mesh.get_local_rank(), mesh.size()

    def part(self, rows: int) -> range:
        """Return which of the rows that ranks of a tensor axis have in common this rank sends; else all."""
        if self._tensor is None:
            return range(rows)
        size = -(-rows // self._tensor.size)
        return range(min(self._tensor.index * size, rows), min((self._tensor.index + 1) * size, rows))

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows of :meth:`part`; in backward the parts of the gradient are gathered."""
        if self._tensor is None:
            return whole
        return self._tensor.cut(_padded(whole, -whole.shape[0] % self._tensor.size), 0)[: len(self.part(len(whole)))]

    def gather(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """Return all ``rows`` from those of :meth:`part`; in backward every rank gets its part of the gradient."""
        if self._tensor is None:
            return part
        return self._tensor.gather(_padded(part, -(-rows // self._tensor.size) - part.shape[0]), 0)[:rows]

    def counts(self, sent: torch.Tensor) -> torch.Tensor:
        """Send row r of ``(ranks, n)`` integers to rank r; row r of the result comes from rank r."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received

    def send(self, rows: torch.Tensor, sent: list[int], received: list[int], *, grad: bool) -> torch.Tensor:
        """Send rows to the experts' ranks.

        Args:
            rows: ``(sum of sent, features)``, those for rank 0 first.
            sent: Numbers of rows for every rank.
            received: Numbers of rows from every rank.
            grad: Whether there will be a backward pass, in which all ranks must take part.

        Returns:
            ``(sum of received, features)``, those of rank 0 first.
        """
        return self._exchange(rows, sent, received, grad, float(self._num_averaged))

    def send_back(self, rows: torch.Tensor, sent: list[int], received: list[int], *, grad: bool) -> torch.Tensor:
        """Send rows back from the experts' ranks; arguments are as in :meth:`send`, for this direction."""
        return self._exchange(rows, sent, received, grad, 1 / self._num_averaged)

    def _exchange(
        self, rows: torch.Tensor, sent: list[int], received: list[int], grad: bool, scale: float
    ) -> torch.Tensor:
        # A rank without rows, which need no gradient then, must take part in backward as well.
        anchor = torch.zeros((), device=rows.device, requires_grad=True) if grad else None
        result: torch.Tensor = _Exchange.apply(rows, anchor, self.group, sent, received, scale)
        return result


def _padded(rows: torch.Tensor, missing: int) -> torch.Tensor:
    """Return rows with so many of zeros behind them."""
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        anchor: torch.Tensor | None,
        group: dist.ProcessGroup,
        sent: list[int],
        received: list[int],
        scale: float,
    ) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received, ctx.scale = group, sent, received, scale
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        back = _exchanged(gradient, ctx.received, ctx.sent, ctx.group)
        return back.mul_(ctx.scale), None, None, None, None, None


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


# --- Stacked experts
#
# Tokens are sorted by expert, sent, computed by the module's own code, and sent back.
# Shapes: T tokens of this rank, k experts for each, H features; R rows arrive at this rank's experts.


@dataclass(frozen=True)
class Call:
    """Arguments of stacked experts: tokens (T, H), the experts of each (T, k), their weights (T, k)."""

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Read the arguments of a call, given by position or keyword.

        Raises:
            ModelError: When they are not tokens, an index and weights.
        """
        names = list(inspect.signature(type(module).forward).parameters)[1:4]
        given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
        if len(given) != len(names) or not all(isinstance(each, torch.Tensor) for each in given):
            raise _called_otherwise(module, f"{len(args)} arguments and {sorted(kwargs)}")
        hidden, index, weights = given
        if index.is_floating_point() or index.shape != weights.shape or index.dim() != 2 or hidden.dim() != 2:
            raise _called_otherwise(module, f"shapes {[tuple(each.shape) for each in given]}")
        return cls(hidden, index, weights)


def _called_otherwise(module: nn.Module, got: str) -> ModelError:
    return ModelError(
        f"expert_parallel: {type(module).__name__} is not called as experts are",
        expected="tokens (T, H), the experts of each (T, k) and their weights (T, k)",
        got=got,
        fix="call a module of stacked experts in this way",
    )


def run_rows(forward: Callable[..., torch.Tensor], rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Call the module's own forward on rows (R, H), each for one expert, with weights of one."""
    return forward(rows, experts[:, None], rows.new_ones((rows.shape[0], 1)))


class StackedDispatch:
    """Wraps the forward of a module of stacked experts whose parameters are DTensors over the axis.

    Args:
        layer: The experts, with divided parameters.
        axis: The ranks that hold them.

    Attributes:
        compute_dtype: Dtype in which unsharded weights compute; None: their own.
    """

    def __init__(self, layer: StackedExperts, axis: ExpertAxis) -> None:
        self._module, self._axis, self._num_experts = layer.module, axis, layer.num_experts
        self.compute_dtype: torch.dtype | None = None

    def __call__(self, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Send tokens to their experts, compute, and weigh and sum the answers."""
        whole, axis = Call.of(self._module, args, kwargs), self._axis
        call = Call(axis.cut(whole.hidden), axis.cut(whole.index), axis.cut(whole.weights))
        weights = {name: local(p) for name, p in self._module.named_parameters(recurse=False)}
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (call.hidden, *weights.values()))
        if self.compute_dtype is not None:
            weights = {name: weight.to(self.compute_dtype) for name, weight in weights.items()}
        order, sent, received, experts = self._routes(call.index)
        top_k = call.index.shape[1]
        arrived = axis.send(call.hidden[order // top_k], sent, received, grad=grad)
        with swapped_parameters(self._module, dict(weights)):
            computed = _run(forward, arrived, experts)
        back = axis.send_back(computed.to(call.hidden.dtype), received, sent, grad=grad)
        # In the order of tokens, zeros where none was sent. A scatter-add would be shorter, but not deterministic.
        every = back.new_zeros((call.index.numel(), back.shape[1])).index_copy(0, order, back)
        weighted = every.view(*call.index.shape, -1) * call.weights[..., None]
        return axis.gather(weighted.sum(1).to(call.hidden.dtype), whole.hidden.shape[0])

    def _routes(self, index: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor]:
        """Return the routes of the pairs of a token and an expert.

        An index of ``num_experts`` stands for no expert: such pairs are not sent.

        Returns:
            Positions in (T·k) sorted by expert; numbers of rows to and from every rank; the expert, counted on this
            rank, of every row received.
        """
        size, per_rank = self._axis.size, self._num_experts // self._axis.size
        flat = index.reshape(-1)
        by_expert, order = flat.sort(stable=True)
        bounds = torch.searchsorted(by_expert, torch.arange(self._num_experts + 1, device=index.device))
        counts = bounds.diff().view(size, per_rank)
        arriving = self._axis.counts(counts)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()  # the only wait for the device
        experts = torch.arange(per_rank, device=index.device).repeat(size)
        experts = experts.repeat_interleave(arriving.flatten(), output_size=sum(received))
        return order[: sum(sent)], sent, received, experts


class TracedDispatch(StackedDispatch):
    """Runs one rank's part of stacked experts without data: it receives as many rows as it sends.

    Args:
        layer: The experts.
        axis: What is sent over it comes back.
        per_rank: Experts of a rank, among which the rows are divided equally.
    """

    def __init__(self, layer: StackedExperts, axis: TracedExperts, per_rank: int) -> None:
        super().__init__(layer, axis)
        self._per_rank = per_rank

    def _routes(self, index: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor]:
        _, order = index.reshape(-1).sort(stable=True)
        rows = [order.shape[0]]
        return order, rows, rows, torch.arange(rows[0], device=index.device) % self._per_rank


class TracedExperts(ExpertAxis):
    """The first rank of an axis in a pass without data: what is sent comes back.

    Args:
        tensor: The size of a tensor axis beside it.
    """

    def __init__(self, tensor: int) -> None:
        self._tensor = TracedAxis(tensor) if tensor > 1 else None

    def echo(self, rows: torch.Tensor, *, grad: bool) -> torch.Tensor:
        """Return a copy of rows, made in forward and in backward as an exchange between ranks makes it."""
        anchor = torch.zeros((), device=rows.device, requires_grad=True) if grad else None
        copied: torch.Tensor = _Copy.apply(rows, anchor)
        return copied

    def send(self, rows: torch.Tensor, sent: list[int], received: list[int], *, grad: bool) -> torch.Tensor:
        """Return a copy of the rows."""
        return self.echo(rows, grad=grad)

    send_back = send


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, anchor: torch.Tensor | None) -> torch.Tensor:
        return torch.empty_like(rows).copy_(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return torch.empty_like(gradient).copy_(gradient), None


def _run(forward: Callable[..., torch.Tensor], arrived: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    if arrived.shape[0]:
        return run_rows(forward, arrived, experts)
    # One row of zeros, so that weights without tokens get gradients of zeros, as in one process.
    rows = torch.cat([arrived, arrived.new_zeros((1, arrived.shape[1]))])
    return run_rows(forward, rows, experts.new_zeros(1))[:0]


# --- Listed experts: [Note: asking twice]
#
# Shapes: rows of H features; an expert returns as many rows and features as it takes.

Question = tuple[int, torch.Tensor]
"""The number of an expert and its input (…, H)."""
Responder = Callable[[int, torch.Tensor], torch.Tensor]
"""Takes the number of an expert and its input, and returns the answer."""

_NOT_ASKED = -1  # as a count of rows; for 0 an expert runs on no rows


class DividedExperts(nn.Module):
    """Replaces a block's list of experts, and holds this rank's experts under their own names.

    A block can index it, loop over it and call the items; a call goes to ``responder`` instead of an expert.

    Args:
        experts: All experts.
        numbers: The numbers of this rank's experts.

    Attributes:
        run_always: Whether experts run without rows, if the reduction of their gradients must find some.
        compute_dtype: Dtype in which unsharded weights compute; None: their own.
        responder: Takes the calls of experts; None outside the block's forward.
    """

    def __init__(self, experts: nn.ModuleList, numbers: range) -> None:
        super().__init__()
        self.numbers = numbers
        self.run_always = False
        self.compute_dtype: torch.dtype | None = None
        self._count = len(experts)
        self.responder: Responder | None = None
        for number in numbers:
            self.add_module(str(number), experts[number])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        if not -self._count <= int(number) < self._count:
            raise IndexError(number)
        return functools.partial(self._call, int(number) % self._count)

    def __iter__(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        return map(self.__getitem__, range(self._count))

    def _call(self, number: int, given: torch.Tensor) -> torch.Tensor:
        if self.responder is None:
            raise ModelError(
                "expert_parallel: an expert is called outside its block's forward",
                expected="calls in the forward of the module that holds the list",
                got=f"a call of expert {number}",
                fix="move the loop over experts into that module",
            )
        return self.responder(number, given)

    def forward(self, arrived: torch.Tensor, counts: Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
        """Run this rank's experts on the rows of all ranks.

        Args:
            arrived: Rows, sorted by rank and expert.
            counts: For every rank the number of rows for each expert here; below zero: not asked.
            dtype: Dtype of the answers.

        Returns:
            The answers, in the order of the rows.
        """
        parts = list(arrived.split([max(count, 0) for of_rank in counts for count in of_rank]))
        for position, number in enumerate(self.numbers):
            if self.run_always or any(of_rank[position] >= 0 for of_rank in counts):
                places = range(position, len(parts), len(self.numbers))
                rows = torch.cat([parts[place] for place in places])
                answers = self._run(self.get_submodule(str(number)), rows)
                check_answer(number, rows, answers)
                answered = answers.to(dtype).split([parts[place].shape[0] for place in places])
                for place, answer in zip(places, answered, strict=True):
                    parts[place] = answer
        return torch.cat([part.to(dtype) for part in parts])

    def _run(self, expert: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            for module in expert.modules() if self.compute_dtype is not None else ():
                own = module.named_parameters(recurse=False)
                stack.enter_context(swapped_parameters(module, {name: p.to(self.compute_dtype) for name, p in own}))
            answers: torch.Tensor = expert(rows)
        return answers


def changed_input(block: nn.Module) -> ModelError:
    """Return the error for a block that cannot run twice, since it changes its input."""
    return ModelError(
        f"expert_parallel: {type(block).__name__} changes its input in place",
        expected="an input that is the same after forward: the block runs twice",
        got="another version of a tensor",
        fix="write x = x * noise, not x *= noise",
    )


def check_answer(number: int, given: torch.Tensor, answer: Any) -> None:
    """Refuse experts that do not return a tensor of the shape they take.

    Raises:
        ModelError: Naming the expert.
    """
    if not isinstance(answer, torch.Tensor) or answer.shape != given.shape:
        raise ModelError(
            f"expert_parallel: expert {number} does not return what can be sent back",
            expected=f"a tensor of shape {tuple(given.shape)}, as it takes",
            got=str(tuple(answer.shape)) if isinstance(answer, torch.Tensor) else type(answer).__name__,
            fix="keep what changes the number of features in the block",
        )


def questions_of(block: nn.Module, experts: DividedExperts, run: Callable[[], Any]) -> list[Question]:
    """Find the questions of a block to its experts, by running it with zeros for answers.

    Args:
        block: The block; its buffers and the random generators are restored afterwards.
        experts: The block's experts.
        run: Runs the block's forward.
    """
    asked: list[Question] = []

    def note(number: int, given: torch.Tensor) -> torch.Tensor:
        asked.append((number, given))
        return torch.zeros_like(given, dtype=answer_dtype(given))

    with answered_by(experts, note), preserved_rng(), preserved_buffers(block):
        run()
    return asked


@contextlib.contextmanager
def answered_by(experts: DividedExperts, responder: Responder) -> Iterator[None]:
    """Let ``responder`` take the calls of experts inside."""
    experts.responder = responder
    try:
        yield
    finally:
        experts.responder = None


@contextlib.contextmanager
def preserved_buffers(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def answering(asked: Sequence[Question], answers: Sequence[torch.Tensor]) -> Responder:
    """Return a responder that gives the answers in the order of the questions.

    Raises:
        ModelError: By the responder, when the second run asks something else.
    """
    remaining = iter(list(zip(asked, answers, strict=True)))

    def answer(number: int, given: torch.Tensor) -> torch.Tensor:
        (expected, noted), found = next(remaining, ((None, None), None))
        if number != expected or noted is None or found is None or given.shape != noted.shape:
            raise ModelError(
                "expert_parallel: a block asks its experts differently when it runs again",
                expected=f"expert {expected} with {None if noted is None else tuple(noted.shape)}",
                got=f"expert {number} with {tuple(given.shape)}",
                fix="let what experts are given depend on the block's input and its random draws alone, not on "
                "answers of other experts or on attributes that forward changes",
            )
        return found

    return answer


def answer_dtype(given: torch.Tensor) -> torch.dtype:
    """Return the dtype of experts' answers: autocast's if it is enabled, else the input's."""
    kind = given.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else given.dtype


class ListedDispatch:
    """Wraps the forward of a block that calls the experts in a list; see [Note: asking twice].

    Args:
        block: The block, with ``experts`` in place of its list.
        experts: This rank's experts.
        axis: The ranks that divide them.
        features: H if known, for a rank whose block asks nothing.
        count: Takes the numbers of this rank's tokens for all experts.
    """

    def __init__(
        self,
        block: nn.Module,
        experts: DividedExperts,
        axis: ExpertAxis,
        features: int | None,
        count: Callable[[torch.Tensor], None],
    ) -> None:
        self._block, self._experts, self._axis, self._features = block, experts, axis, features
        self._count = count
        self._trains = any(parameter.requires_grad for parameter in experts.parameters())

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward twice, with the exchange in between."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [version_of(tensor) for tensor in inputs]
        asked = questions_of(self._block, self._experts, functools.partial(forward, *args, **kwargs))
        if [version_of(tensor) for tensor in inputs] != versions:
            raise changed_input(self._block)
        answers, link = self._ask(asked, next(tensor for tensor in inputs if tensor.is_floating_point()))
        with answered_by(self._experts, answering(asked, answers)):
            output = forward(*args, **kwargs)
        return output if link is None else _linked(output, link)

    def _ask(self, asked: Sequence[Question], like: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return the answers in the order of the questions, and a zero to add if this rank has sent no row.

        Without the zero the block's output would not depend on the exchange, in whose backward the others wait.
        """
        axis = self._axis
        order = sorted(range(len(asked)), key=lambda each: asked[each][0])
        features = asked[0][1].shape[-1] if asked else self._features or like.shape[-1]
        rows = [asked[each][1].reshape(-1, features) for each in order]
        whole = torch.cat(rows or [like.new_empty((0, features))])
        numbers = [asked[each][0] for each in order]
        counts = _counts(numbers, rows, len(self._experts), axis.part(len(whole)))
        every = torch.tensor(_counts(numbers, rows, len(self._experts), range(len(whole))))
        self._count(every.clamp(min=0).to(like.device, non_blocking=True))
        leaving = torch.tensor(counts).view(axis.size, -1).to(like.device, non_blocking=True)
        arriving = axis.counts(leaving).tolist()  # the only wait for the device, beside those of the block itself
        sent = [sum(max(count, 0) for count in part) for part in torch.tensor(counts).view(axis.size, -1).tolist()]
        received = [sum(max(count, 0) for count in part) for part in arriving]
        grad = torch.is_grad_enabled() and (self._trains or any(part.requires_grad for part in (*rows, like)))
        arrived = axis.send(axis.cut(whole), sent, received, grad=grad)
        computed = self._experts(arrived, arriving, answer_dtype(like))
        back = axis.gather(axis.send_back(computed, received, sent, grad=grad), len(whole))
        answers: list[torch.Tensor] = [back] * len(asked)
        for each, answer in zip(order, back.split([part.shape[0] for part in rows]) if rows else (), strict=True):
            answers[each] = answer.view(asked[each][1].shape)
        return answers, back.sum() if grad and not len(whole) else None


def _counts(numbers: Sequence[int], rows: Sequence[torch.Tensor], num_experts: int, own: range) -> list[int]:
    """Return how many of this rank's ``own`` rows go to each expert, where ``rows`` lie one behind the other.

    An expert that is asked with no row counts 0.
    """
    counts, first = [_NOT_ASKED] * num_experts, 0
    for number, part in zip(numbers, rows, strict=True):
        end = first + part.shape[0]
        inside = max(min(end, own.stop) - max(first, own.start), 0)
        counts[number], first = max(counts[number], 0) + inside, end
    return counts


def _linked(output: Any, link: torch.Tensor) -> Any:
    """Add a zero to the output's first tensor, which makes it depend on the zero's graph."""
    leaves, form = tree_flatten(output)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaves[place] = leaf + link.to(leaf.dtype)
            break
    return tree_unflatten(leaves, form)
