"""Autograd's engine and graph: the base of our functions, the end of a backward pass, hooks, and recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.overrides import _get_current_function_mode_stack as current_function_modes
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

__all__ = [
    "BACKWARD_HOOKS",
    "EarlierFunction",
    "Function",
    "StopRecomputation",
    "accumulation_hooks_of",
    "backward_hooks_of",
    "current_function_modes",
    "current_graph_task_id",
    "current_node",
    "current_saved_tensors_hooks",
    "in_functorch_transform",
    "next_sequence_number",
    "num_dispatch_modes",
    "queue_callback",
    "sequence_number_of",
    "set_script_profiling",
    "split_sizes_of",
]

ATTRIBUTES_OF = ("torch.Tensor", "torch.autograd.graph")

# Which modes of ``__torch_function__`` are entered: attention is not to be replaced twice. Replaced by a public list.
# (``current_function_modes``, above.)

# The number of the backward pass that runs in this thread, -1 for none: passes are told apart by it.
# ``torch.autograd.graph`` has nothing like it.
current_graph_task_id = torch._C._current_graph_task_id

# Call a function at the end of the backward pass that runs. DDP and FSDP2 end theirs the same way. A public
# ``torch.autograd.graph.queue_callback`` would replace it.
queue_callback = Variable._execution_engine.queue_callback

# The node whose backward runs, and the numbers by which a node's forward is found: the planner assigns the cost of
# backward to the modules whose forward made it. Profilers read the same. Not public anywhere.
current_node = torch._C._current_autograd_node
sequence_number_of = methodcaller("_sequence_nr")
next_sequence_number = torch._C._autograd._get_sequence_nr

# How many modes of ``__torch_dispatch__`` are entered: torch's ``FlopCounterMode`` fails on products that name the type
# of their sums (``addmm_flop`` takes it for a shape). Nothing public tells.
num_dispatch_modes = torch._C._len_torch_dispatch_stack

# Under ``torch.func`` transforms our own products must not be used: they know no batching rules.
# ``torch.compiler`` and ``torch.func`` have no such question.
in_functorch_transform = torch._C._are_functorch_transforms_active

# TorchScript's profiling, and how torch's checkpoint stops a recomputation. Recomputed code must save the same tensors
# in every run, but TorchScript profiles the first run of a function, and optimises later ones;
# ``torch.jit.optimized_execution(False)`` leaves alone what is optimised already. A public switch would replace the
# first; a checkpoint that stops cleanly inside of scripted functions would replace the rest.
set_script_profiling = torch._C._jit_set_profiling_mode

# The pack and unpack hooks that saved tensors go through now.
current_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# What ``torch.split`` saved in its node: tensor parallelism reads from it where a fused projection is cut.
_SPLIT_SIZES = "_saved_split_sizes"


def split_sizes_of(node: Any) -> Any:
    """Return the sizes that a node of ``torch.split`` saved; None for other nodes."""
    return getattr(node, _SPLIT_SIZES, None)


# The dictionaries behind ``register_hook`` and ``register_post_accumulate_grad_hook``. Methods put other parameters in
# the place of those that users have put hooks on, and torch can only register hooks, not list them.
BACKWARD_HOOKS = "_backward_hooks"
backward_hooks_of = attrgetter(BACKWARD_HOOKS)
accumulation_hooks_of = attrgetter("_post_accumulate_grad_hooks")


class EarlierFunction(torch.autograd.Function):
    """Keeps gradients that torch 2.11 silently loses in compiled code.

    There a result has none when it was written in place (``all_reduce(result)``, ``out.copy_(x)``) or came from a cast
    to the type that it had: its node in the graph is not the one that made it. A view of it is a node of its own.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.forward = staticmethod(_with_views(cls.forward))  # type: ignore[method-assign]


def _with_views(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any) -> Any:
        result = forward(*args)
        # Not elsewhere: a view that was made without autograd cannot be written to afterwards.
        if not torch.compiler.is_compiling():
            return result
        return tuple(_view(each) for each in result) if isinstance(result, tuple) else _view(result)

    return run


def _view(value: Any) -> Any:
    return value.view_as(value) if type(value) is torch.Tensor else value


if TYPE_CHECKING or TorchVersion(torch.__version__) >= (2, 13):
    Function = torch.autograd.Function
else:
    Function = EarlierFunction
