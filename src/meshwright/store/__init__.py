"""Saved training state: verified checkpoint directories that load into any layout of ranks, and weights in one file."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.store.checkpoints import CheckpointStore as CheckpointStore
    from meshwright.store.entries import CheckpointInfo as CheckpointInfo, TrainingState as TrainingState
    from meshwright.store.host_snapshots import HostSnapshots as HostSnapshots
    from meshwright.store.model_file import (
        LoadedKeys as LoadedKeys,
        load as load,
        save as save,
        save_folder as save_folder,
    )
    from meshwright.store.optimizer_file import load_optimizer as load_optimizer, save_optimizer as save_optimizer
    from meshwright.store.scheduler_file import (
        load_lr_scheduler as load_lr_scheduler,
        save_lr_scheduler as save_lr_scheduler,
    )
    from meshwright.store.tensor_files import wait_for_saves as wait_for_saves
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
