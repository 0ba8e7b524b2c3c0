"""Saved training state: verified checkpoint directories that load into any layout of ranks, and weights in one file."""

from meshwright.store.checkpoints import CheckpointStore
from meshwright.store.file import LoadedKeys, load, save, save_folder
from meshwright.store.optimizer_file import load_optimizer, save_optimizer
from meshwright.store.scheduler_file import load_lr_scheduler, save_lr_scheduler
from meshwright.store.state import CheckpointInfo, TrainingState
from meshwright.store.writer import wait_for_saves

__all__ = [
    "CheckpointInfo",
    "CheckpointStore",
    "LoadedKeys",
    "TrainingState",
    "load",
    "load_lr_scheduler",
    "load_optimizer",
    "save",
    "save_folder",
    "save_lr_scheduler",
    "save_optimizer",
    "wait_for_saves",
]
