"""Dispatch tokens to experts in lists, whose blocks run twice.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.methods.expert.dispatch import ExpertAxis, autocast_dtype
from meshwright.methods.tensor.split_layers import swapped_parameters
from meshwright.runtime import preserved_rng
from meshwright.runtime.torch_internals.pytree import tree_flatten, tree_leaves, tree_unflatten
from meshwright.runtime.torch_internals.tensors import version_of

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
        return torch.zeros_like(given, dtype=autocast_dtype(given))

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
        computed = self._experts(arrived, arriving, autocast_dtype(like))
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
