"""Learning-rate schedules, all of torch's kind: the warm-up and decay of the command line, and BMTrain's by alias."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.lr_scheduler.linear_warmup import DECAYS as DECAYS, Decay as Decay, warmup_decay as warmup_decay
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
