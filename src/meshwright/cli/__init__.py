"""Doors for people: the commands of ``meshwright``."""

from meshwright.cli.commands import app, main

__all__ = ["app", "main"]
