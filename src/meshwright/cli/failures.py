"""Report a failed command: one paragraph for errors that users can fix, a traceback for all others."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.errors import MeshwrightError, printable
from meshwright.runtime import rank, synchronize, world_size
from meshwright.runtime.terminal import PlainConsole

INTERRUPTED = 130  # after Ctrl-C, as shells have it
# What gloo and NCCL report on the ranks that did not fail.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "remote process exited")


def show_messages(level: str | None) -> None:
    """Show messages of other libraries from a level of ``logging`` on; None leaves it as it is.

    The program shows their errors alone: what they log and warn of on import is of libraries that were built for other
    machines, and of calls among themselves. ``logging.disable`` also holds for those that set a level of their own.
    """
    if level is None:
        return
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.disable(number - 1)
    if number < logging.WARNING:
        logging.basicConfig(level=number, format="%(name)s: %(message)s")
        logging.getLogger().setLevel(number)
    if number <= logging.WARNING:
        warnings.resetwarnings()


def exit_status(command: Callable[[], int], *, show_traceback: bool = False) -> int:
    """Run a command and report its failure on stderr.

    Rank 0 reports an error that all ranks agreed on; the rank that raised any other error reports it, with its number.

    Args:
        command: Returns its exit status.
        show_traceback: Show where a MeshwrightError was raised, too.

    Returns:
        The exit status.
    """
    try:
        return command()
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except MeshwrightError as error:
        _report_error(error, show_traceback)
        _wait_for_report(error)
    except Exception as error:
        _report_bug(error)
        _wait_for_report(error)
    return 1


def leave(status: int) -> NoReturn:
    """End a rank at once, without the interpreter's finalization.

    gloo's threads may still own tensors of the last collectives. A thread that releases one during finalization aborts
    the process (pytorch#179291), and a finished run would be reported as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait_for_report(error: Exception) -> None:
    """Wait until rank 0 has reported an agreed error: the launcher ends it as soon as another rank is gone."""
    if getattr(error, "agreed", False):
        with contextlib.suppress(Exception):
            synchronize()


def _report_error(error: MeshwrightError, show_traceback: bool) -> None:
    agreed = getattr(error, "agreed", False)
    if agreed and rank() != 0:
        return None
    if show_traceback:
        traceback.print_exception(error)
    notes = tuple(getattr(error, "__notes__", ()))
    console = PlainConsole(stderr=True, highlight=False)
    if console.is_terminal:
        return console.print(laid_out(error, notes, "" if agreed else _own_name()))
    return _say(" ".join([f"{'' if agreed else _own_name()}error: {error}", *notes]))


def laid_out(error: MeshwrightError, notes: Sequence[str] = (), own_name: str = "") -> Group:
    """Lay out an error for a terminal, one line per part; files and pipes get one paragraph.

    Args:
        error: The error.
        notes: Its notes.
        own_name: Name of the rank that reports it, if it alone raised it.
    """
    title = Text.assemble(f"meshwright: {own_name}", ("error", "bold red"), f": {error.what}")
    parts = Table.grid(padding=(0, 2, 0, 0))
    parts.add_column(no_wrap=True, style="dim")
    parts.add_column(overflow="fold")
    got = "" if error.got in error.what else error.got  # say nothing twice
    for label, text in (("expected", error.expected), ("got", got), ("what to do", error.fix)):
        if text:
            parts.add_row(label, Text(text))
    return Group(title, Padding(parts, (0, 0, 0, 2)), *(Text(note) for note in notes))


def _report_bug(error: Exception) -> None:
    if world_size() > 1 and any(words in str(error) for words in _LOST_PEER):
        # The rank that failed reports why.
        return _say(f"{_own_name()}lost the connection to another rank")
    distributed = sys.modules.get("torch.distributed")  # none is lost before it is imported
    if distributed is not None and isinstance(error, distributed.DistNetworkError):
        cause = str(error).splitlines()[0]
        return _say(f"{_own_name()}lost the store of the ranks, which rank 0 or the launcher keeps: {cause}")
    agreed = getattr(error, "agreed", False)
    if agreed and rank() != 0:
        return None
    # One write, so that the lines of two ranks do not mix.
    text = "".join(traceback.format_exception(error))
    return _say(f"{_own_name()}failed\n{text.rstrip()}")


def _own_name() -> str:
    return f"rank {os.environ['RANK']} " if "RANK" in os.environ else ""


def _say(text: str) -> None:
    sys.stderr.write(f"meshwright: {printable(text)}\n")
    sys.stderr.flush()
