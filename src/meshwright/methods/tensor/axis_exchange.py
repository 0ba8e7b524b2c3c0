"""Exchange tensors between the ranks of a tensor axis, with gradients.

Each exchange and its backward are transposes of each other (Shoeybi et al. 2019, §3, f and g). Gradients of whole
tensors are whole and equal on all ranks of the axis.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from meshwright.comm.transport import all_gather_flat, reduce_scatter_flat
from meshwright.errors import ModelError
from meshwright.loss.lazy_logits import LazyTensor
from meshwright.methods.tensor.block_trials import close, evaluating, random_state
from meshwright.nn import call_with
from meshwright.runtime.torch_internals.autograd import Function, current_graph_task_id, current_saved_tensors_hooks
from meshwright.runtime.torch_internals.fake_tensors import is_traceable_wrapper_subclass
from meshwright.runtime.torch_internals.modules import PARAMETERS
from meshwright.runtime.torch_internals.pytree import tree_leaves, tree_map
from meshwright.runtime.torch_internals.tensors import (
    DisableTorchFunctionSubclass,
    make_wrapper,
    storage_identity,
    version_of,
)


class TensorAxis:
    """The ranks that hold the parts of one layer.

    Methods of the first group pass gradients on; those of the second do not.

    Args:
        mesh: A mesh of one axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.index, self.size = mesh.get_local_rank(), mesh.size()

    # With gradients

    def copy(self, whole: torch.Tensor) -> torch.Tensor:
        """Pass a whole tensor to a split region: identity in forward, the sum of the ranks' gradients in backward."""
        return self._with_backward(whole, "same", "sum")

    def mean_gradient(self, whole: torch.Tensor) -> torch.Tensor:
        """Identity in forward, the mean of the ranks' gradients in backward, where each has another part of them."""
        return self._with_backward(whole, "same", "mean")

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' results in forward; identity in backward."""
        return self._with_backward(part, "sum", "same")

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' results in forward, and their gradients in backward."""
        return self._with_backward(part, "sum", "sum")

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate equal parts along ``dim``; in backward every rank gets its part of the gradient."""
        return self._with_backward(part, "whole_of", "part_of", dim)

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Take this rank's part of a whole tensor; in backward the parts of the gradient are concatenated."""
        return self._with_backward(whole, "part_of", "whole_of", dim)

    def gather_tokens(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Gather tokens for a split region; in backward gradients are summed and scattered."""
        return self._with_backward(part, "whole_of", "summed_part", dim)

    def scatter_tokens(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Sum the ranks' results and scatter their tokens; in backward gradients are gathered."""
        return self._with_backward(part, "summed_part", "whole_of", dim)

    def _with_backward(self, tensor: torch.Tensor, forward: str, backward: str, dim: int = 0) -> torch.Tensor:
        result: torch.Tensor = _Exchange.apply(tensor, self, forward, backward, dim)
        return result

    # Without gradients; ``dim`` is ignored by those that need none

    def same(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return a view of the tensor."""
        return tensor.view_as(tensor)

    def sum(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the sum over the ranks."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def mean(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the mean over the ranks."""
        return self.sum(tensor).div_(self.size)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the maximum over the ranks."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def _reduced(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._all_reduce(result, op)
        return result

    def part_of(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Copy this rank's part along ``dim``."""
        return whole.detach().chunk(self.size, dim)[self.index].contiguous()

    def summed_part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part along ``dim`` of the sum over the ranks."""
        dim %= max(tensor.dim(), 1)
        if _is_first(tensor.shape, dim):
            split = (self.size * tensor.shape[0], *tensor.shape[1:]) if dim else tensor.shape
            shape = [size // self.size if dim and at == dim else size for at, size in enumerate(split)]
            stacked = tensor.detach().contiguous().view(shape)
        else:
            stacked = torch.cat(tensor.detach().chunk(self.size, dim))
        result = stacked.new_empty((stacked.shape[0] // self.size, *stacked.shape[1:]))
        self._reduce_scatter(result, stacked)
        return result

    def whole_of(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the parts of all ranks, concatenated along ``dim``."""
        part = part.detach().contiguous()
        parts = self._room_for(part)
        self._all_gather(parts, part)
        return self._joined(parts, part.shape, dim)

    def begin_whole_of(self, part: torch.Tensor, dim: int) -> Callable[[], torch.Tensor]:
        """Begin :meth:`whole_of`; the function that is returned waits for the result."""
        part = part.detach().contiguous()
        parts = self._room_for(part)
        work = self._all_gather(parts, part, async_op=True)

        def finished() -> torch.Tensor:
            if work is not None:
                work.wait()
            return self._joined(parts, part.shape, dim)

        return finished

    def _room_for(self, part: torch.Tensor) -> torch.Tensor:
        return part.new_empty((self.size * part.shape[0], *part.shape[1:]) if part.dim() else (self.size,))

    def _joined(self, parts: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
        dim %= max(len(shape), 1)
        if not _is_first(shape, dim):
            return torch.cat(parts.chunk(self.size), dim)
        # The parts lie one after the other: that is the whole already.
        return parts.view([self.size * size if at == dim else size for at, size in enumerate(shape)] or [self.size])

    # Communication

    def _all_reduce(self, result: torch.Tensor, op: Any) -> None:
        dist.all_reduce(result, op, group=self.group)

    def _reduce_scatter(self, result: torch.Tensor, stacked: torch.Tensor) -> None:
        reduce_scatter_flat(result, stacked, group=self.group)

    def _all_gather(self, parts: torch.Tensor, part: torch.Tensor, *, async_op: bool = False) -> Any:
        return all_gather_flat(parts, part, group=self.group, async_op=async_op)


def _is_first(shape: torch.Size, dim: int) -> bool:
    """Return whether no dimension before ``dim`` has several elements, so that parts along it lie as they are sent."""
    return all(size == 1 for size in shape[:dim])


class TracedAxis(TensorAxis):
    """The first rank of an axis in a pass without data: makes the same tensors, and sends nothing.

    Args:
        size: Size of the axis.
    """

    def __init__(self, size: int) -> None:
        self.index, self.size = 0, size

    def _all_reduce(self, result: torch.Tensor, op: Any) -> None:
        pass

    def _reduce_scatter(self, result: torch.Tensor, stacked: torch.Tensor) -> None:
        pass

    def _all_gather(self, parts: torch.Tensor, part: torch.Tensor, *, async_op: bool = False) -> Any:
        pass


class _Exchange(Function):
    """Calls one method of an axis in forward, and another, its transpose, in backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, axis: TensorAxis, operation: str, transpose: str, dim: int
    ) -> torch.Tensor:
        ctx.axis, ctx.transpose, ctx.dim = axis, transpose, dim
        result: torch.Tensor = getattr(axis, operation)(tensor, dim)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # type: ignore[override]
        return getattr(ctx.axis, ctx.transpose)(gradient, ctx.dim), None, None, None, None


# --- Gathered inputs

# [Note: gathered inputs] Layers split by columns take all tokens, and need them again in backward, for gradients of
# their weights. What is saved for that is the rank's part, as in Megatron-LM (Korthikanti et al. 2022, §4.2.2), and
# backward gathers once more, for all layers with the input together. Layers keep their own products, whatever these
# are, since only what autograd saves in them is replaced, by hooks. Hooks around these (of recomputation, offloading,
# records) get the part, as if the layer had saved it. The gather begins when the row layer behind them has gathered its
# gradient, and runs beside that layer's products.
#
# In compiled code there are no hooks. There the gather is marked as recomputed, which torch's partitioner does with
# collectives that are marked alone; what it saves of their inputs is its own choice. A schedule that computes gradients
# of inputs and of weights apart unpacks what is saved in both, so it would gather twice: it keeps all tokens.


class GatheredInput:
    """Gathers the tokens for some layers, in forward and once more in backward. See [Note: gathered inputs].

    Args:
        axis: The tensor axis.
        dim: The dim of tokens.
        keeps: Whether all tokens are saved instead.
        gathered: Called with the part and all tokens.
        saved: Called behind the layers if backward will gather again: with the bytes, and whether that begins early.
    """

    def __init__(
        self,
        axis: TensorAxis,
        dim: int,
        *,
        keeps: bool = False,
        gathered: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
        saved: Callable[[int, bool], None] | None = None,
    ) -> None:
        self._axis, self._dim, self._keeps, self._gathered, self._saved = axis, dim, keeps, gathered, saved
        self._now: _Gathered | None = None  # while the layers run

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the tokens in the precision of the layers' products; gradients are summed and scattered."""
        part = as_products(part)
        again = not self._keeps and torch.is_grad_enabled()
        if again and torch.compiler.is_compiling():
            marked: torch.Tensor = checkpoint(self._axis.gather_tokens, part, self._dim, use_reentrant=False)
            return marked
        whole = self._axis.gather_tokens(part, self._dim)
        if self._gathered is not None:
            self._gathered(part, whole)
        if again:
            self._now = _Gathered(self._axis, self._dim, part, whole)
        return whole

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one of the layers."""
        if torch.compiler.is_compiling() or self._now is None:
            return forward(*args, **kwargs)
        with self._now.saved_as_part():
            return forward(*args, **kwargs)

    def behind(self, result: torch.Tensor) -> torch.Tensor:
        """Let the gather in backward begin when the gradient of a result of the layers is there."""
        if torch.compiler.is_compiling() or self._now is None or not self._now.num_saves:
            return result
        begins: torch.Tensor = _Begin.apply(result, self._now)
        return begins

    def forget(self) -> None:
        """Forget the tokens, behind the layers."""
        now, self._now = self._now, None
        if now is not None:
            now.forget()
            if now.num_saves and self._saved is not None:
                self._saved(now.num_bytes, now.begins)


def as_products(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor to the precision in which autocast would run products and attention.

    What is cast before it is sent is cast once, and half is sent.
    """
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


@dataclass(frozen=True, eq=False)
class _Part:
    """Saved in place of a view of gathered tokens."""

    part: Any  # as the hooks around pack it
    unpack: Callable[[Any], torch.Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Gathered:
    """Tokens that were gathered in one forward.

    Args:
        axis: The tensor axis.
        dim: The dim of tokens.
        part: This rank's tokens.
        whole: All of them.
    """

    def __init__(self, axis: TensorAxis, dim: int, part: torch.Tensor, whole: torch.Tensor) -> None:
        self._axis, self._dim = axis, dim
        self._part: torch.Tensor | None = part.detach()
        # The reference keeps the address of freed memory from being used for another storage.
        self._memory, self._dtype = StorageWeakRef(whole.untyped_storage()), whole.dtype
        self._version, self.num_bytes = version_of(whole), whole.numel() * whole.element_size()
        self.num_saves = self._left = 0  # in forward, and those for which backward has not asked
        self.begins = False
        self._first: weakref.ref[_Part] | None = None
        self._begun: Callable[[], torch.Tensor] | None = None
        self._again: torch.Tensor | None = None

    def saved_as_part(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context in which autograd saves the part where it would save all tokens."""
        pack, unpack = current_saved_tensors_hooks(True) or (_with_version, _without_version)

        def packed(tensor: torch.Tensor) -> Any:
            if not self._is_whole(tensor):
                return pack(tensor)
            assert self._part is not None, "the layers run"
            self.num_saves += 1
            self._left += 1
            part = _Part(pack(self._part), unpack, tensor.shape, tensor.stride(), tensor.storage_offset())
            if self._first is None:
                self._first = weakref.ref(part)
            return part

        def unpacked(saved: Any) -> torch.Tensor:
            return self._whole_again(saved) if isinstance(saved, _Part) else unpack(saved)

        return torch.autograd.graph.saved_tensors_hooks(packed, unpacked)

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        # Weights of FSDP2 and of 8 bits may wrap others.
        if tensor.dtype != self._dtype or is_traceable_wrapper_subclass(tensor):
            return False
        same = storage_identity(tensor.untyped_storage()) == self._memory.cdata
        return same and version_of(tensor) == self._version

    def begin(self) -> None:
        """Begin to gather again, if a layer has saved the part."""
        first = self._first() if self._first is not None else None
        if first is not None and self._begun is None and self._again is None:
            self._begun = self._axis.begin_whole_of(first.unpack(first.part), self._dim)

    def _whole_again(self, saved: _Part) -> torch.Tensor:
        if self._again is None:
            begun, self._begun = self._begun, None
            self._again = begun() if begun is not None else self._axis.whole_of(saved.unpack(saved.part), self._dim)
        whole = self._again
        self._left -= 1
        if not self._left:  # a graph that is retained may run again
            self._left, self._again = self.num_saves, None
        return whole.as_strided(saved.size, saved.stride, saved.offset)

    def forget(self) -> None:
        """Leave the part to what is saved of it."""
        self._part = None


class _Begin(Function):
    """Identity whose backward begins to gather some tokens again."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gathered: _Gathered) -> torch.Tensor:
        ctx.gathered = gathered
        gathered.begins = True
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.gathered.begin()
        return gradient, None


def _with_version(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor, version_of(tensor)


def _without_version(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a saved tensor, unless it was changed: hooks switch autograd's own check off."""
    tensor, version = saved
    if version_of(tensor) != version:
        raise ModelError(
            "tensor_parallel: a tensor that backward needs was changed in place after forward",
            expected="inputs and weights of split layers as they were in forward",
            got=f"{tuple(tensor.shape)} of {tensor.dtype} at version {version_of(tensor)}, saved at version {version}",
            fix="leave out the operation in place, or run it after backward",
        )
    return tensor


# --- Hidden states behind the last block

# [Note: tokens gathered late] Behind the last block the tokens of all ranks come together. The norm that follows treats
# each token alone; of all tokens, on every rank, it would take many times the memory of a block's part, since it
# computes in fp32. So the last block hands on :class:`LateTokens`, which have the shape of all tokens and this rank's
# part. Modules outside the blocks that are found to treat each token alone work on the part, and hand on the same;
# anything else gathers the tokens. Gradients of such a module's parameters are those of a part: over axes that divide
# tokens inside attention they are averaged, as those of blocks are; over a tensor axis they are summed.

_SEED = 7
Gather = Callable[[torch.Tensor], torch.Tensor]


class LateTokens(LazyTensor):
    """A hidden state (batch, tokens, features) of which this rank has a part of the tokens; made by :meth:`of`.

    See [Note: tokens gathered late].

    Attributes:
        gathers: Gathers all tokens of a part, differentiably.
        shared: What is applied to the parameters of a module that works on the part, one after the other.
    """

    gathers: Gather
    shared: tuple[Gather, ...]

    @classmethod
    def of(cls, part: torch.Tensor, count: int, gather: Gather, shared: tuple[Gather, ...]) -> LateTokens:
        """Wrap a part of ``count`` tokens, so that gradients of the whole and of the part reach it."""
        with DisableTorchFunctionSubclass():
            tokens: LateTokens = _WrapTokens.apply(part, count, gather)
        # Inside the Function the part was detached from its graph.
        tokens.part, tokens.gathers, tokens.shared = part, gather, shared
        return tokens

    def make_whole(self) -> torch.Tensor:
        """Gather the tokens; collective."""
        return self.gathers(self.part)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        # Without values: printing on one rank must not wait for the others.
        return f"LateTokens(shape={tuple(self.shape)}, part={tuple(self.part.shape)}, dtype={self.dtype})"


class _WrapTokens(torch.autograd.Function):
    """Wrap a part; backward takes the gradient of all tokens, which a Function may return."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, count: int, gather: Gather) -> LateTokens:
        ctx.gather, ctx.like = gather, (part.shape, part.dtype, part.device)
        shape = (part.shape[0], count, *part.shape[2:])
        tokens: LateTokens = make_wrapper(LateTokens, shape, dtype=part.dtype, device=part.device)
        tokens.part, tokens.whole = part, None
        return tokens

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        shape, dtype, device = ctx.like
        with torch.enable_grad():
            part = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
            (of_part,) = torch.autograd.grad(ctx.gather(part), part, gradient)
        return of_part, None, None


def gathered_late(hidden: torch.Tensor, count: int, gather: Gather, *shared: Gather) -> torch.Tensor:
    """Return all tokens of a hidden state, of which this rank has a part, gathered when something needs them.

    Args:
        hidden: (batch, tokens, features); what another axis gathers late, too, is gathered by that first.
        count: Number of all tokens.
        gather: Gathers them, differentiably.
        shared: What is applied to parameters of modules that work on the part.
    """
    if isinstance(hidden, LateTokens) and hidden.whole is None:
        inner = hidden.gathers
        return LateTokens.of(hidden.part, count, lambda part: gather(inner(part)), (*hidden.shared, *shared))
    is_late = torch.is_grad_enabled() and hidden.requires_grad and not torch.compiler.is_compiling()
    if not is_late or current_graph_task_id() != -1:
        return gather(hidden)
    return LateTokens.of(hidden, count, gather, shared)


class TokenWise:
    """Modules outside the blocks that may work on parts of the tokens, and all others.

    Args:
        model: A plain module.
        blocks: Paths of the blocks.
    """

    def __init__(self, model: nn.Module, blocks: Collection[str]) -> None:
        self._model = model
        prefixes = tuple(f"{path}." for path in blocks)
        outside = [
            module
            for path, module in model.named_modules()
            if path not in blocks and not path.startswith(prefixes) and next(module.children(), None) is None
        ]
        self._alone = [module for module in outside if treats_tokens_alone(module)]
        self._others = [module for module in outside if module not in self._alone]

    def take_parts(self) -> list[Any]:
        """Let these modules work on parts, and all others on all tokens; return the handles of the hooks."""
        hooks: list[Any] = [self._model.register_forward_hook(_end)]
        hooks += [
            module.register_forward_pre_hook(_gather_inputs, with_kwargs=True, prepend=True) for module in self._others
        ]
        for module in self._alone:
            run = _OnPart()
            hooks.append(module.register_forward_pre_hook(run.enter))
            hooks.append(module.register_forward_hook(run.leave, always_call=True))
        return hooks


def treats_tokens_alone(module: nn.Module) -> bool:
    """Return whether a module computes each token's features from this token's alone, as norms do; tried on some.

    Not one with buffers: what it gathers in training, such as a mean over tokens, it may only read in the trial.
    """
    parameters = list(module.parameters(recurse=False))
    is_plain = next(module.children(), None) is None and next(module.buffers(recurse=False), None) is None
    if not is_plain or {p.dim() for p in parameters} != {1}:
        return False
    tokens = torch.randn((2, 4, parameters[0].shape[0]), generator=torch.Generator().manual_seed(_SEED))
    try:
        with evaluating(module), torch.no_grad():
            state = random_state(module, _SEED)
            whole, part = (call_with(module, state, (each,)) for each in (tokens, tokens[:, 1:3]))
    except Exception:  # it takes something else
        return False
    return isinstance(whole, torch.Tensor) and whole.shape == tokens.shape and close(part, whole[:, 1:3], 0.0)


class _OnPart:
    """Runs a module on the part of what it is called with."""

    def __init__(self) -> None:
        self._tokens: LateTokens | None = None  # while the module runs
        self._parameters: dict[str, Any] = {}

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(args) != 1 or not isinstance(args[0], LateTokens) or args[0].whole is not None:
            return None
        self._tokens = args[0]
        own = getattr(module, PARAMETERS)
        self._parameters = dict(own)
        for share in self._tokens.shared:
            own.update({name: share(value) for name, value in own.items() if value is not None})
        return (self._tokens.part,)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            return None
        getattr(module, PARAMETERS).update(self._parameters)
        self._parameters = {}
        return LateTokens.of(output, tokens.shape[1], tokens.gathers, tokens.shared) if output is not None else None


def _gather_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (_gathered(args), _gathered(kwargs)) if _has_late((args, kwargs)) else None


def _end(module: nn.Module, args: Any, output: Any) -> Any:
    """Gather what a model returns."""
    return _gathered(output) if _has_late(output) else None


def _has_late(tree: Any) -> bool:
    return any(isinstance(leaf, LateTokens) for leaf in tree_leaves(tree))


def _gathered(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.materialised() if isinstance(leaf, LateTokens) else leaf, tree)
