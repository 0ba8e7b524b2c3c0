"""WHICH strategy: profile the model, predict strategies, choose one, show it."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.planner.config_models import transformers_model as transformers_model
    from meshwright.planner.family_ops import Implementation as Implementation
    from meshwright.planner.family_workload import FamilyModel as FamilyModel, FamilyWorkload as FamilyWorkload
    from meshwright.planner.model_shapes import (
        Shape as Shape,
        known_models as known_models,
        parse_family as parse_family,
    )
    from meshwright.planner.plan_request import PlanRequest as PlanRequest, plan as plan
    from meshwright.planner.plans import (
        Forecast as Forecast,
        Plan as Plan,
        PlannedModel as PlannedModel,
        Subject as Subject,
        cluster_at_hand as cluster_at_hand,
        described_cluster as described_cluster,
        forecast as forecast,
        plan_table as plan_table,
    )
    from meshwright.planner.search.search_space import (
        Space as Space,
        choices as choices,
        default_space as default_space,
    )
    from meshwright.planner.search.search_state import Found as Found
    from meshwright.planner.strategy_choice import choose as choose, fitting as fitting, only_configs as only_configs
    from meshwright.planner.trace.live_tensors import record_saved as record_saved
    from meshwright.planner.trace.model_state import (
        OptimizerProbe as OptimizerProbe,
        describe_blocks as describe_blocks,
        measured_state as measured_state,
    )
    from meshwright.planner.workload import (
        ModuleModel as ModuleModel,
        Workload as Workload,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
