"""Strategies of Lightning, for Fabric and for its Trainer, that are strategies of Meshwright."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.integrations.lightning.fabric import FabricStrategy as FabricStrategy
    from meshwright.integrations.lightning.trainer import TrainerStrategy as TrainerStrategy
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
