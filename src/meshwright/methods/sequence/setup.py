"""What the methods that divide tokens have in common before and after they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.methods.job import Job
from meshwright.methods.sequence.order import TokenOrder
from meshwright.methods.sequence.proof import prove_blocks
from meshwright.methods.sequence.tokens import block_lists
from meshwright.methods.tensor.exchange import TensorAxis
from meshwright.nn import without_caches
from meshwright.utils.trees import map_tree


def check_parts(
    job: Job, order: TokenOrder, check_queries: Callable[[torch.Tensor], None] = lambda queries: None
) -> None:
    """Refuses models whose blocks cannot work on a part of the tokens; says so where there is no sample to find out.

    Args:
        job: The job; its model is not changed.
        order: How tokens are dealt.
        check_queries: See :func:`prove_blocks`.

    Raises:
        ModelError: With the reason.
    """
    config = getattr(job.model, "config", None)
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            f"{order.method}: a loss of routers over all tokens is not computed from parts of them",
            expected="output_router_logits=False",
            got="True",
            fix="switch it off in the model's config",
        )
    block_lists(job.model, order.method)
    notice = prove_blocks(job.model, job.sample, order, check_queries)
    if notice:
        job.notices.append(notice)


def whole_input_gradients(model: nn.Module, axis: TensorAxis) -> None:
    """Gives a gradient that leaves the model through its inputs (a discriminator's) the tokens of all ranks.

    Behind the cut a rank has n times the gradient of its own tokens, which for weights the averaging evens out.
    """

    def whole(value: Any) -> Any:
        return axis.mean_gradient(value) if isinstance(value, torch.Tensor) and value.requires_grad else value

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_tree(whole, args), map_tree(whole, kwargs)

    model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)


def without_cache(job: Job, method: str) -> None:
    """Switches key-value caches off: a rank has a part of the tokens."""
    if without_caches(job.model):
        job.notices.append(f"{method}: config.use_cache was set to False; a rank has a part of the tokens")
