"""Models made of the layers beside this folder."""

from models.gpt import GPT

__all__ = ["GPT"]
