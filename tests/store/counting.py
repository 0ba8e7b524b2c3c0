"""Counts what a rank opens, writes and is sent while it saves or loads."""

import contextlib
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

_watching: list["Counts"] = []


@dataclass
class Counts:
    """Of one rank, below one directory."""

    directory: Path
    opened: list[str] = field(default_factory=list)
    """Files that were opened for reading, once for every time."""
    listed: int = 0
    """Directories that were listed."""
    received_bytes: int = 0
    """Of pickled objects that other ranks sent."""

    @property
    def files(self):
        return set(self.opened)


def _hook(event, args):
    for counts in _watching:
        if event == "open" and isinstance(args[0], str | bytes) and _is_below(args[0], counts.directory):
            writes = isinstance(args[1], str) and any(letter in args[1] for letter in "wax+")
            # os.open tells its flags only: a directory is opened to be synced.
            if not writes and not Path(args[0]).is_dir():
                counts.opened.append(Path(args[0]).name)
        elif event in ("os.listdir", "os.scandir") and args and _is_below(args[0], counts.directory):
            counts.listed += 1


def _is_below(path, directory):
    return str(path).startswith(str(directory))


_installed = False


@contextlib.contextmanager
def counting(directory):
    """Counts until the end of the block; collectives of objects go through ``torch.distributed``'s functions."""
    global _installed
    if not _installed:
        sys.addaudithook(_hook)  # stays: audit hooks cannot be removed
        _installed = True
    counts = Counts(Path(directory))
    with contextlib.ExitStack() as stack:
        for name, sent in (
            ("all_gather_object", 0), ("gather_object", 1), ("broadcast_object_list", 0), ("scatter_object_list", 0)
        ):  # fmt: skip
            stack.callback(setattr, dist, name, getattr(dist, name))
            setattr(dist, name, _counted(getattr(dist, name), sent, counts))
        _watching.append(counts)
        stack.callback(_watching.remove, counts)
        yield counts


def _counted(function, place, counts):
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        given = args[place] if len(args) > place else next(iter(kwargs.values()))
        given = kwargs.get("object_gather_list", given)
        counts.received_bytes += sum(len(pickle.dumps(each)) for each in given or ())
        return result

    return call
