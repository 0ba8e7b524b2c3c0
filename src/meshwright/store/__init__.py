"""Saved training state: complete, verified checkpoint directories that load into any layout of ranks."""

from meshwright.store.checkpoints import CheckpointStore
from meshwright.store.state import CheckpointInfo, TrainingState

__all__ = ["CheckpointInfo", "CheckpointStore", "TrainingState"]
