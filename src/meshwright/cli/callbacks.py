"""Call a user's own functions during ``meshwright train``: after steps, validations and checkpoints, and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.cli.references import call_reference, resolve_reference, takes
from meshwright.errors import NOTE, ConfigError

EVENTS = ("on_step", "on_eval", "on_checkpoint", "on_stop")


class Callbacks:
    """The objects that ``run.callbacks`` names, made on every rank.

    Each name is a class or a function that returns an object with some of the methods ``on_step(step, result)``,
    ``on_eval(step, figures)``, ``on_checkpoint(step, path)`` and ``on_stop(step)``. It is called with ``job``, the
    :class:`meshwright.Accelerated`, where it takes that.

    What a method raises ends the run, as an error of the model does; checkpoints stay as they are.

    Args:
        names: ``module:function`` texts.
        job: The job.

    Raises:
        ConfigError: When one does not exist, or has none of the methods.
    """

    def __init__(self, names: Sequence[str], job: Any) -> None:
        self._every = [(name, self._made(name, job)) for name in names]

    @staticmethod
    def _made(name: str, job: Any) -> Any:
        function = resolve_reference(name, "run.callbacks")
        given = {"job": job} if takes(function, "job") else {}
        made = call_reference(
            function, name, given, key="run.callbacks", expected="an object with methods", error_cls=ConfigError
        )
        if not any(callable(getattr(made, event, None)) for event in EVENTS):
            raise ConfigError(
                f"The callback {name} is never called",
                expected=f"an object with some of the methods {', '.join(EVENTS)}",
                got=f"{type(made).__name__} with none of them",
                fix="name a class with such methods",
            )
        return made

    def call(self, event: str, *arguments: Any) -> None:
        """Call a method of each that has it."""
        for name, each in self._every:
            method = getattr(each, event, None)
            if callable(method):
                try:
                    method(*arguments)
                except Exception as error:
                    error.add_note(f"{NOTE}raised by {event} of the callback {name}")
                    raise
