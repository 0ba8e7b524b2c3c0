"""Which checkpoint of a directory to use: the newest that is whole. Those that are not are named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from meshwright import runtime
from meshwright.errors import CheckpointError, join_names
from meshwright.store.manifest import MANIFEST, check_contents, check_present, read_manifest
from meshwright.store.record import Record, read_record

TENSORS = "tensors"  # a folder of its own: DCP reads every safetensors file in it
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def complete_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Steps and directories of all complete checkpoints, oldest first; what they hold is not read."""
    found = [(int(match[1]), path) for path in directory.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return sorted((step, path) for step, path in found if (path / MANIFEST).is_file())


def verify(path: Path, part: int = 0, num_parts: int = 1) -> Record:
    """Reads every file of a checkpoint once and compares it with the manifest.

    Args:
        path: The directory of one checkpoint.
        part: Only every ``num_parts``-th file is hashed, from this one on: ranks divide the work.
        num_parts: How many do.

    Returns:
        What the checkpoint says of itself.

    Raises:
        CheckpointError: Naming every file that is missing, damaged or not of this checkpoint.
    """
    files = read_manifest(path)
    if part == 0:  # thousands of ranks asking for thousands of files would stall a shared file system
        check_present(path, files, folders=[TENSORS])
    check_contents(path, files, sorted(files)[part::num_parts])
    return read_record(path)


def damage_of(path: Path) -> list[CheckpointError]:
    """Everything that is wrong with a checkpoint: unlike :func:`verify` goes on after the first kind of damage."""
    try:
        files = read_manifest(path)
    except CheckpointError as error:
        return [error]
    whole = [name for name in sorted(files) if _has_size(path / name, files[name].size)]
    found: list[CheckpointError] = []
    for check in (
        lambda: check_present(path, files, folders=[TENSORS]),
        lambda: check_contents(path, files, whole),
        lambda: read_record(path),
    ):
        try:
            check()
        except CheckpointError as error:
            found.append(error)
    return found


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def newest_valid(candidates: Sequence[Path]) -> tuple[Path | None, list[CheckpointError]]:
    """The first checkpoint that is whole, and why those before it are not; collective, equal on every rank."""
    damaged: list[CheckpointError] = []
    for path in candidates:
        try:
            with runtime.same_on_every_rank():
                verify(path, runtime.rank(), runtime.world_size())
        except CheckpointError as error:
            damaged.append(error)
        else:
            return path, damaged
    return None, damaged


def nothing_valid(directory: Path, damaged: Sequence[CheckpointError]) -> CheckpointError:
    """The error when a directory holds no checkpoint, or damaged ones only."""
    if damaged:
        return CheckpointError(
            f"Every checkpoint in {directory} is damaged",
            expected="one that is whole",
            got=" | ".join(str(error) for error in damaged),
            fix="copy one again from its source, or start from the beginning",
        )
    others = sorted(path.name for path in directory.glob("*")) if directory.is_dir() else []
    return CheckpointError(
        f"There is no checkpoint in {directory}",
        expected=f"a directory step-… with a {MANIFEST}",
        got=join_names(others) if directory.is_dir() else "no such directory",
        fix="check the directory, or start from the beginning with --resume none",
    )
