"""Replicas of weights compared by their bits, and mended."""
