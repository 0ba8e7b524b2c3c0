"""Tensor parallelism: plan which layers are split, prove the split on single blocks, apply it."""
