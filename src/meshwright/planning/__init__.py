"""The door for plans: a model and a cluster in, ranked strategies with their predictions out. Nothing is trained."""

from meshwright.planning.door import plan
from meshwright.planning.models import FamilyModel, ModuleModel, PlannedModel
from meshwright.planning.request import PlanRequest
from meshwright.planning.transformers import transformers_model

__all__ = ["FamilyModel", "ModuleModel", "PlanRequest", "PlannedModel", "plan", "transformers_model"]
