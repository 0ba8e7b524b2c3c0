"""Saved training state: verified checkpoint directories that load into any layout of ranks, and weights in one file."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.store.checkpoints import CheckpointStore
    from meshwright.store.file import LoadedKeys, load, save, save_folder
    from meshwright.store.optimizer_file import load_optimizer, save_optimizer
    from meshwright.store.scheduler_file import load_lr_scheduler, save_lr_scheduler
    from meshwright.store.state import CheckpointInfo, TrainingState
    from meshwright.store.writer import wait_for_saves
else:
    on_demand(
        __name__,
        """
        checkpoints: CheckpointStore
        file: LoadedKeys load save save_folder
        optimizer_file: load_optimizer save_optimizer
        scheduler_file: load_lr_scheduler save_lr_scheduler
        state: CheckpointInfo TrainingState
        writer: wait_for_saves
        """,
    )

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
