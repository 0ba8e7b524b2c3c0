"""Random strategies on 2 to 8 ranks, held against one plain process: ``python -m tests.fuzz.strategies``."""
