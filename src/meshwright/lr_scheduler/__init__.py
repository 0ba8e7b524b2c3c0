"""Learning-rate schedules: BMTrain's and WSD, and the warm-up and decay of the command line; all are torch's kind."""

from meshwright.lr_scheduler.base import WarmupLRScheduler
from meshwright.lr_scheduler.schedules import WSD, Cosine, Exponential, Linear, Noam, NoDecay
from meshwright.lr_scheduler.warmup import DECAYS, Decay, warmup_decay

__all__ = [
    "DECAYS",
    "WSD",
    "Cosine",
    "Decay",
    "Exponential",
    "Linear",
    "NoDecay",
    "Noam",
    "WarmupLRScheduler",
    "warmup_decay",
]
