"""Attention in a ring of ranks that each have a part of the tokens, for ``context_parallel``."""
