"""Learning-rate schedules, composed from torch's own."""

from meshwright.lr_scheduler.warmup import DECAYS, Decay, warmup_decay

__all__ = ["DECAYS", "Decay", "warmup_decay"]
