"""WHICH strategy: candidates, predicted one by one and ranked."""

from meshwright.planner.search.found import Found

__all__ = ["Found"]
