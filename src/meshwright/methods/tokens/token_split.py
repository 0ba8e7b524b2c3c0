"""Give each rank a part of the tokens between the first and the last block, and prove that blocks allow it.

[Note: parts of the tokens]
Hooks cut the hidden state before the first block of a list, and whatever else goes with tokens (positions, cosines and
sines) before each block; masks stay whole. In each block, calls of ``scaled_dot_product_attention`` go to the ranks
(:class:`TokenRanks`), which compute attention over all tokens. A hook behind the last block hands on the hidden state
of all tokens, which is gathered when something needs it: see [Note: tokens gathered late]. All other code runs
unchanged on all tokens. That is right only if tokens meet nowhere in a block but in attention, and if nothing in it
depends on positions that it counts itself, so each kind of block is tried first: it runs once on all tokens, with
random values, and once on each part. A part's attention is answered from the run on all tokens, if its queries, keys
and values are the parts of that run's; then the part's output must be, too.

Tokens are cut and gathered in pairs only if blocks run in the order of their list, from the first to the last, however
often: :class:`CallOrder` checks it in every forward. The run of the sample, and the first forward in training, also
show whether the model's output depends on what a block returns other than through the gathered hidden state: on parts
of the tokens, that is (:class:`OutputWatch`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.methods.pipeline.splice import Elsewhere
from meshwright.methods.replace.fused_layers import share_loss
from meshwright.methods.tensor.axis_exchange import LateTokens, TensorAxis, TokenWise, gathered_late
from meshwright.methods.tensor.model_split import change_hidden_output
from meshwright.methods.tensor.split_proof import TOKENS_DIM, first_hidden, hidden_argument
from meshwright.methods.tokens.attention_calls import (
    TokenRanks,
    answering,
)
from meshwright.methods.tokens.token_order import TokenOrder
from meshwright.nn import require_blocks, wrap_method
from meshwright.nn.batches import map_tree
from meshwright.runtime.torch_internals.autograd import Function, current_graph_task_id
from meshwright.runtime.torch_internals.pytree import tree_leaves, tree_map

_OF_POSITIONS = ("position", "rotary", "rope", "freqs", "cos", "sin")  # in names of arguments that go with tokens

BlockList = list[tuple[str, nn.Module]]

Place = Literal["first", "following", "staged"]
"""Position of a block: the first gets all tokens; the first in a later pipeline stage gets a part already."""


def work_on_parts(model: nn.Module, ranks: TokenRanks) -> None:
    """Cut and gather tokens in hooks around the blocks, and let ``ranks`` compute attention inside them.

    With several axes call it for the innermost first: an axis applied later cuts before it, and gathers after it.
    """
    is_whole, lists = True, block_lists(model, ranks.order.method)
    TokenWise(model, [path for blocks in lists for path, _ in blocks]).take_parts()
    for blocks in lists:
        for path, block in blocks:
            wrap_method(block, "forward", answering(path, ranks))
        others = _others(model, blocks)
        cut_tokens(model, blocks, ranks, others)
        is_whole = is_whole and others is None
    if is_whole:
        OutputWatch(model, ranks.order.method).check_once()


def _others(model: nn.Module, blocks: BlockList) -> tuple[bool, bool] | None:
    """Return whether other pipeline ranks have blocks of the list before and after these; None if it is whole here."""
    paths = [path for path, _ in blocks]
    children = list(model.get_submodule(paths[0].rpartition(".")[0]).children())
    places = [children.index(block) for _, block in blocks]
    elsewhere = [place for place, child in enumerate(children) if isinstance(child, Elsewhere)]
    if not elsewhere:
        return None
    return elsewhere[0] < places[0], elsewhere[-1] > places[-1]


def block_lists(model: nn.Module, method: str) -> list[BlockList]:
    """Return the blocks of a model with their paths, list by list.

    Raises:
        ModelError: When there are none, naming the method.
    """
    blocks = require_blocks(
        model, method=method, fix="put the layers into such a list; or use fsdp, which shares out samples alone"
    )
    return [list(group) for _, group in itertools.groupby(blocks, lambda block: block[0].rpartition(".")[0])]


def cut_tokens(
    model: nn.Module, blocks: BlockList, ranks: TokenRanks, others: tuple[bool, bool] | None = None
) -> list[Any]:
    """Cut tokens before the first block and gather them late, behind the last; return the hooks' handles.

    Args:
        model: The whole model, at the end of whose forward all tokens must be together.
        blocks: The blocks of one list.
        ranks: The ranks that divide the tokens.
        others: Whether other pipeline ranks have blocks before and after these; they cut or gather then. None: no
            other rank has blocks of this list.
    """
    tokens, (before, after) = TokenParts(ranks.order, ranks, equally=others is not None), others or (False, False)
    following: Place = "staged" if before or after else "following"
    hooks: list[Any] = [
        block.register_forward_pre_hook(
            functools.partial(tokens.enter, path, following if before or place else "first"),
            with_kwargs=True,
            prepend=True,
        )
        for place, (path, block) in enumerate(blocks)
    ]
    if others is None:  # a pipeline itself refuses blocks that run out of turn
        hooks += CallOrder(ranks.order.method, blocks).watch(model)
    if after:
        return hooks
    # Behind the last block all ranks have the same.
    hooks.append(share_loss(model, ranks))

    def leave(hidden: torch.Tensor) -> torch.Tensor:
        tokens.forget()
        return gathered_late(hidden, tokens.count, lambda part: tokens.all_of(ranks.gather(part)))

    return [*hooks, change_hidden_output(blocks[-1][1], leave)]


class CallOrder:
    """Checks that the blocks of a list run from the first to the last; some between them may be left out.

    Args:
        method: Name of the method, for errors.
        blocks: The blocks of one list.

    Attributes:
        error: What is wrong with the forward that ran last; None if nothing is.
    """

    def __init__(self, method: str, blocks: BlockList) -> None:
        self._method, self._blocks = method, blocks
        self._next = 0  # the first block that may run now; 0 while all tokens are together
        self.error: ModelError | None = None

    def watch(self, model: nn.Module) -> list[Any]:
        """Check every forward of the model; return the hooks' handles."""

        def enter(place: int, module: nn.Module, args: Any) -> None:
            if _in_backward():  # a recomputation, of calls that were checked
                return
            path = self._blocks[place][0]
            if place < self._next:
                self._refuse(f"{path} runs again before {self._blocks[-1][0]} has run")
            elif place and not self._next:
                self._refuse(f"{path} runs without {self._blocks[0][0]} before it")
            self._next = (place + 1) % len(self._blocks)

        return [
            model.register_forward_pre_hook(self._begin, prepend=True),
            *(
                block.register_forward_pre_hook(functools.partial(enter, place), prepend=True)
                for place, (_, block) in enumerate(self._blocks)
            ),
            model.register_forward_hook(self._end),
        ]

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._next, self.error = 0, None  # an earlier forward may have failed half-way

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._next and not _in_backward():
            ran, last = self._blocks[self._next - 1][0], self._blocks[-1][0]
            self._refuse(f"the model ends after {ran} without {last}")

    def _refuse(self, got: str) -> None:
        first, last = self._blocks[0][0], self._blocks[-1][0]
        self.error = ModelError(
            f"{self._method}: blocks run out of turn, between which tokens are cut and gathered",
            expected=f"the blocks of a list in its order, from {first} to {last}, in every pass",
            got=got,
            fix="give every place in which a block runs an entry of its own in the nn.ModuleList; or use fsdp or "
            "tensor_parallel",
        )
        raise self.error


def _in_backward() -> bool:
    return not torch.compiler.is_compiling() and current_graph_task_id() != -1


class TokenParts:
    """Gives the blocks of one list this rank's part of the arguments that go with tokens.

    Args:
        order: This rank's tokens.
        ranks: Are told the number of tokens.
        equally: Whether the axis must divide the tokens: stages of a pipeline cannot tell padding from tokens.
    """

    def __init__(self, order: TokenOrder, ranks: TokenRanks | None = None, *, equally: bool = False) -> None:
        self._order, self._ranks, self._equally = order, ranks, equally
        self._count = 0  # tokens of the whole sequence that runs
        # By id and dim: arguments that several blocks take, whole and in part; keeping the whole keeps its id unique.
        self._known: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def enter(
        self, path: str, place: Place, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return this rank's part of the arguments of the block at ``path``.

        Raises:
            ModelError: Without a hidden state, or with one of another number of tokens than this rank's.
        """
        where = hidden_argument(args, kwargs)
        if where is None:
            raise self._wrong_hidden(path, "no tensor of that form")
        hidden = args[where] if isinstance(where, int) else kwargs[where]
        if place == "first":
            self._order.check(hidden.shape[TOKENS_DIM], equally=self._equally)
            self._run(hidden.shape[TOKENS_DIM])
        elif place == "staged" or (_in_backward() and not self._is_part(hidden)):
            self._run(int(hidden.shape[TOKENS_DIM]) * self._order.size * self._order.within)
        elif not self._is_part(hidden):
            raise self._wrong_hidden(path, f"{hidden.shape[TOKENS_DIM]} of {self._count} tokens")

        def argument(name: str, value: Any) -> Any:
            if value is hidden:
                return self._order.part(hidden, TOKENS_DIM) if place == "first" else hidden
            return tree_map(functools.partial(self._part, name), value)

        names = [*_argument_names(type(module)), *[""] * len(args)]  # a block may take *args
        positional = tuple(argument(name, value) for name, value in zip(names, args, strict=False))
        return positional, {name: argument(name, kwargs[name]) for name in kwargs}

    @property
    def count(self) -> int:
        """Return the number of tokens of the whole sequence that runs."""
        return self._count

    def forget(self) -> None:
        """Drop the cached arguments, behind the last block."""
        self._known = {}

    def all_of(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return all tokens without padding; in backward, blocks that are recomputed get as many as in this run."""
        if gathered.shape[TOKENS_DIM] > self._count:
            gathered = gathered[:, : self._count].contiguous()
        if torch.compiler.is_compiling() or not gathered.requires_grad:
            return gathered
        hidden: torch.Tensor = _Again.apply(gathered, functools.partial(self._run, self._count))
        return hidden

    def _run(self, count: int) -> None:
        """Begin a run with a number of tokens."""
        self._count, self._known = count, {}
        if self._ranks is not None:
            self._ranks.tokens = count

    def _is_part(self, hidden: torch.Tensor) -> bool:
        """Return whether a hidden state between two blocks is a rank's part of the tokens that run."""
        part = self._order.padded(self._count) // self._order.size
        return bool(hidden.shape[TOKENS_DIM] == -(-part // self._order.within))

    def _part(self, name: str, leaf: Any) -> Any:
        dim = tokens_dim(name, leaf, self._count) if isinstance(leaf, torch.Tensor) else None
        if dim is None:
            return leaf
        if (id(leaf), dim) not in self._known:
            self._known[id(leaf), dim] = leaf, self._order.part(leaf, dim)
        return self._known[id(leaf), dim][1]

    def _wrong_hidden(self, path: str, got: str) -> ModelError:
        return ModelError(
            f"{self._order.method}: {path} is not called with the part of the tokens that the block before it returned",
            expected="blocks called one after the other with hidden states (batch, tokens, features)",
            got=got,
            fix="use fsdp or tensor_parallel",
        )


class _Again(Function):
    """Identity whose backward calls ``begin`` first."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, begin: Callable[[], None]) -> torch.Tensor:
        ctx.begin = begin
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.begin()
        return gradient, None


def _argument_names(kind: type[nn.Module]) -> tuple[str, ...]:
    every = list(inspect.signature(kind.forward).parameters.values())[1:]
    return tuple(each.name for each in every if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))


def tokens_dim(name: str, tensor: torch.Tensor, tokens: int) -> int | None:
    """Return the dim along which a block's argument is divided like the tokens; None if it stays whole.

    Hidden states, and cosines and sines of positions, are (…, tokens, features); position ids (…, tokens). Masks
    (…, tokens or 1, tokens) stay whole, since attention is over all tokens.
    """
    named = any(word in name for word in _OF_POSITIONS)
    if tensor.is_floating_point() or tensor.is_complex():
        fits = tensor.dim() >= 2 and tensor.shape[-2] == tokens and (named or tensor.shape[-1] != tokens)
        return tensor.dim() - 2 if fits else None
    return tensor.dim() - 1 if named and tensor.dim() and tensor.shape[-1] == tokens else None


class OutputWatch:
    """Follows what blocks return through runs of the whole model, up to its output.

    Args:
        model: A plain module.
        method: Name of the method, for errors.
    """

    def __init__(self, model: nn.Module, method: str) -> None:
        self._model, self._method = model, method
        self._lists = block_lists(model, method)
        self._orders = [CallOrder(method, blocks) for blocks in self._lists]
        self._parts: dict[Any, str] = {}  # nodes of autograd that have a part of the tokens on a rank, with their block
        self._gathered: set[Any] = set()  # nodes of hidden states that are gathered
        self._partial: str | None = None  # the block on which the output depends

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the runs inside; the last one counts."""
        hooks = [hook for order in self._orders for hook in order.watch(self._model)] + self._watch()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def check_once(self) -> None:
        """Check the first forward with gradients, in which the hooks remove themselves."""

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if not self._gathered:
                return
            for hook in hooks:
                hook.remove()
            self._begin(module, args)  # keep no graph alive
            self.check()

        hooks = self._watch()
        hooks.append(self._model.register_forward_hook(end))

    def _watch(self) -> list[Any]:
        hooks = [self._model.register_forward_pre_hook(self._begin), self._model.register_forward_hook(self._end)]
        for blocks in self._lists:
            for path, block in blocks:
                leave = functools.partial(self._leave, path, block is blocks[-1][1])
                hooks.append(block.register_forward_hook(leave))
        return hooks

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._parts, self._gathered = {}, set()

    def _leave(self, path: str, is_last: bool, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        leaves = tree_leaves(output)
        hidden = first_hidden(leaves) if is_last else None
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                if place == hidden:
                    self._gathered |= {leaf.grad_fn, leaf.part.grad_fn if isinstance(leaf, LateTokens) else None}
                else:
                    self._parts[leaf.grad_fn] = path

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        waiting = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        seen, self._partial = set(self._gathered), None
        while waiting and self._partial is None:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            self._partial = self._parts.get(node)
            waiting += [before for before, _ in node.next_functions]

    def check(self) -> None:
        """Refuse what the last run has shown.

        Raises:
            ModelError: When blocks run out of turn, or the model's output depends on a part of the tokens.
        """
        error = next((order.error for order in self._orders if order.error is not None), None)
        if error is not None:
            raise error
        if self._partial is not None:
            raise ModelError(
                f"{self._method}: the model's output depends on what {self._partial} returns, of which a rank has a "
                "part of the tokens",
                expected="an output that depends on blocks only through the hidden state of the last one of their list",
                got="one that uses what a block between returns, or returns beside the hidden state",
                fix="switch such outputs off (output_hidden_states=False); or use fsdp or tensor_parallel",
            )


def whole_input_gradients(model: nn.Module, axis: TensorAxis) -> None:
    """Average gradients that leave the model through its inputs (a discriminator's) over the ranks of the axis.

    Before the cut a rank has n times the gradient of its own tokens and none of the others'. For weights, averaging
    over the axis corrects that; for inputs nothing else does.
    """

    def whole(value: Any) -> Any:
        return axis.mean_gradient(value) if isinstance(value, torch.Tensor) and value.requires_grad else value

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_tree(whole, args), map_tree(whole, kwargs)

    model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
