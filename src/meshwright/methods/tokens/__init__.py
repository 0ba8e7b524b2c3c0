"""Splitting the tokens of a sample over ranks: Ulysses-style sequence parallelism and ring attention."""
