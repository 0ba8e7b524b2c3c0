"""Saved training state: verified checkpoint directories that load into any layout of ranks, and weights in one file."""

from meshwright.store.checkpoints import CheckpointStore
from meshwright.store.file import LoadedKeys, load, save
from meshwright.store.state import CheckpointInfo, TrainingState
from meshwright.store.writer import wait_for_saves

__all__ = ["CheckpointInfo", "CheckpointStore", "LoadedKeys", "TrainingState", "load", "save", "wait_for_saves"]
