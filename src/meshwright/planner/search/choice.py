"""Rank plans as an engineer would: within the error of predictions, the simpler plan with memory to spare comes first.

[Note: choice within the error] Predictions of two plans for the same model are off by about 8 % against each other, so
a plan that is 3 % faster on paper is as likely to be slower. What is certain is what a plan asks of those who run it:
copies to the host, more axes, a full device. Plans are therefore ranked by their figure with surcharges: of each method
its ``surcharge`` (see :class:`~meshwright.methods.planner_hooks.PlannerHooks`), and of a device that is full
``FULL_DEVICE``. Those of methods that published runs use stay within ``MODEL_ERROR``, so what is faster by more than
predictions are off comes first; methods that no published run was compared with may ask for more, and all together for
at most ``MOST``. Bounds take the surcharge of the methods, so a search finds what ranking every plan would.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from meshwright.methods import Method, Role
from meshwright.planner.plans import Plan, usable_bytes

if TYPE_CHECKING:
    from meshwright.strategy import MethodConfig

MODEL_ERROR = 0.08
"""Share by which predictions of plans for one model are off against each other (docs/predictions.md)."""

MOST = 0.15
"""Largest surcharge of a plan."""

FULL_DEVICE = 0.02
"""Surcharge of a plan that takes all memory it may; of one that takes half of it, half of that."""

_SAMPLED = ("data", "zero")
_TOKENS = {"sequence": "tokens", "context": "tokens"}

Family = tuple[tuple[str, ...], bool, bool]
"""Axes that divide the model or samples, whether parameters or states are sharded, and whether any are offloaded."""


def methods_surcharge(methods: Iterable[MethodConfig]) -> float:
    """Return the share by which a plan with some methods must be faster to be worth them."""
    return min(sum(method.surcharge for method in methods if isinstance(method, Method)), MOST)


def surcharge(plan: Plan) -> float:
    """Return the share by which a plan must be faster than one without methods on an empty device."""
    # A limit that somebody gives is not a fuller device.
    usable = 0 if plan.forecast is None else usable_bytes(plan.forecast.cluster.device)
    usable = max(usable, plan.limit_bytes or 0)
    full = min(plan.needed_bytes / usable, 1.0) if usable else 0.0
    return min(methods_surcharge(plan.strategy.methods) + FULL_DEVICE * full, MOST)


def family_of(axes: Sequence[tuple[str, int]], methods: Iterable[MethodConfig]) -> Family:
    """Return the family of a strategy: what it divides and moves, but not in how many parts, or which schedule it has.

    Args:
        axes: Sizes of the mesh.
        methods: All its methods.
    """
    named = {_TOKENS.get(axis, axis) for axis, size in axes if size > 1 and axis not in _SAMPLED}
    known = [method for method in methods if isinstance(method, Method)]
    shards = any(method.role is Role.SHARDING for method in known)
    return tuple(sorted(named)), shards, any(method.role is Role.OFFLOADING for method in known)
