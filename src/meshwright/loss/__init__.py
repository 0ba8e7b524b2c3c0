"""Losses."""

from meshwright.loss.next_token import next_token_loss

__all__ = ["next_token_loss"]
