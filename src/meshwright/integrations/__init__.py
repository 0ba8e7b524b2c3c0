"""Doors into other people's loops: their Trainers, distributed by a strategy. Each is imported by its own name."""
