"""Doors for people: the commands of ``meshwright``."""

from meshwright.cli.app import app, main

__all__ = ["app", "main"]
