"""The pages of the manual and the README as the tests read them: blocks of code, links and anchors."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OTHERS = (
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "examples/gpt2/README.md",
)

# Other systems' code is there to be recognised; it is compiled and not run.
FOREIGN = {
    "BMTrain", "ATorch", "ColossalAI", "fairseq", "DeepSpeed", "Accelerate", "Ray", "Lightning Fabric", "torchmetrics",
    "transformers' Trainer", "Lightning's Trainer",
}  # fmt: skip

_FENCE = re.compile(r"^```(\w*)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of code."""

    page: str
    line: int
    language: str
    title: str
    code: str

    @property
    def where(self):
        return f"{self.page}:{self.line}"

    @property
    def is_foreign(self):
        return self.title in FOREIGN


@functools.cache
def pages():
    """The text of every page by its path in the repository, generated ones included."""
    written = {path: (ROOT / path).read_text() for path in OTHERS}
    written |= {f"docs/{path.relative_to(DOCS)}": path.read_text() for path in sorted(DOCS.glob("**/*.md"))}
    return written | {
        f"docs/{name}": text for name, text in hooks("manual").generated().items() if name.endswith(".md")
    }


def hooks(name):
    """A module of ``docs/hooks``."""
    sys.path.insert(0, str(DOCS / "hooks"))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(DOCS / "hooks"))


def blocks(page, *languages):
    """The blocks of a page in these languages."""
    found = []
    for match in _FENCE.finditer(pages()[page]):
        title = re.search(r'title="([^"]*)"', match[2])
        line = pages()[page].count("\n", 0, match.start()) + 1
        if match[1] in languages:
            found.append(Block(page, line, match[1], title[1] if title else "", match[3]))
    return found


def without_code(text):
    """The prose of a page: fenced blocks and code in lines left out."""
    return re.sub(r"`[^`\n]*`", "``", _FENCE.sub("", text))
