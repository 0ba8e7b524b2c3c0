"""Meshwright: plain PyTorch in; the best distributed plan out: predicted, explained, applied, trained."""
