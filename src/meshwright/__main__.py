"""``python -m meshwright``."""

from __future__ import annotations

from meshwright.cli import main

if __name__ == "__main__":
    main()
