"""What is said of an upstream suite: its files, the changes that its users make, and what does not apply."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["as it is", "with a change", "does not apply", "fails"]


@dataclasses.dataclass(frozen=True)
class Change:
    """One mechanical edit that a user makes: a regular expression and what takes its place.

    ``why`` is for people and ends up on the page. An edit that matches nothing is no edit.
    """

    pattern: str
    replacement: str
    why: str

    def edit(self, text: str) -> str:
        """Return ``text`` with every match replaced."""
        return re.sub(self.pattern, self.replacement, text, flags=re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Case:
    """A file, or all files that a shell pattern names (``*`` crosses folders); the last case that fits one counts.

    ``because`` set: the file does not apply, and that is the reason. ``sizes`` are edits that make a program for large
    GPUs small enough for a CPU: no change that its users make. ``ranks`` holds the numbers of processes that it is
    started on; ``0`` means one process that starts its own workers. ``project`` marks what is no test but a program
    of people downstream: the losses that it prints are kept. ``run`` is how it is started, where ``{file}`` stands for
    it: a script by itself, or ``-m pytest -q {file}``.
    """

    files: str
    because: str = ""
    changes: tuple[Change, ...] = ()
    ranks: tuple[int, ...] = (1, 2, 4)
    run: str = "{file}"
    project: bool = False
    timeout_s: float = 300.0
    sizes: tuple[Change, ...] = ()


@dataclasses.dataclass(frozen=True)
class Suite:
    """An upstream repository: which files belong to it, the change of import, and its cases.

    Attributes:
        name: What this suite is called on the command line.
        title: The system's own name.
        repository: Where the source is published, ``owner/name``.
        files: Shell patterns of the files that the page lists, relative to the checkout.
        imports: The change of import, applied to every Python file of the copy.
        cases: From the general to the particular.
        losses: What a program prints its losses as: the pattern's first group is the number.
        python_path: Folders of the copy that its programs import from.
    """

    name: str
    title: str
    repository: str
    files: tuple[str, ...]
    imports: tuple[Change, ...]
    cases: tuple[Case, ...]
    losses: str = r"loss[\"']?\s*[:=|]\s*([-+0-9.e]+)"
    python_path: tuple[str, ...] = (".",)

    def listed(self, source: Path) -> list[str]:
        """Return every file of the suite in ``source``, sorted."""
        names = (path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
        return sorted(name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in self.files))

    def case(self, name: str) -> Case:
        """Return the case that counts for the file ``name``."""
        fitting = [case for case in self.cases if fnmatch.fnmatch(name, case.files)]
        return fitting[-1] if fitting else Case(name)


@dataclasses.dataclass
class Outcome:
    """What came of one file: ``ranks`` maps a number of processes to ``"passed"`` or the failure's last line."""

    file: str
    verdict: Verdict
    ranks: dict[str, str] = dataclasses.field(default_factory=dict)
    why: str = ""  # the change that was made, or why it does not apply
    losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def read(cls, record: dict[str, Any]) -> Outcome:
        """Build an outcome from what :func:`dataclasses.asdict` made of one."""
        return cls(**record)
