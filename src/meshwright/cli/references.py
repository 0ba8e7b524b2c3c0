"""Import and call what ``module:function`` references name; callbacks of a run are such objects, too."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.errors import NOTE, ConfigError, MeshwrightError, ModelError, did_you_mean


def find_modules_beside(folder: Path) -> None:
    """Put a folder first on the import path, as Python does for a script in it."""
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]


def resolve_reference(reference: str, key: str) -> Callable[..., Any]:
    """Import what ``module:name`` refers to.

    Args:
        reference: The reference.
        key: Where it stands in the training file, for errors.

    Raises:
        ConfigError: When there is no such module or name, importing fails, or it cannot be called.
    """
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise _not_imported(module_name, f"{key} {reference!r}", error) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(
            f"{key} {reference!r}: {module.__file__ or module_name} has no function {name!r}"
            f"{did_you_mean(name, vars(module).keys() - {name})}",
            expected="a function or class",
            got="nothing of that name" if found is None else type(found).__name__,
            fix=f"correct {key}",
        )
    return found


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function names an argument.

    ``**kwargs`` do not count: what they are passed on to is unknown.
    """
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def call_reference(
    function: Callable[..., Any],
    reference: str,
    arguments: Mapping[str, Any],
    *,
    key: str,
    expected: str,
    error_cls: type[MeshwrightError],
) -> Any:
    """Call what a reference refers to.

    Args:
        function: The function or class.
        reference: Its ``module:name``.
        arguments: Keyword arguments.
        key: Table of the training file, or the option, that names it, for errors.
        expected: What it has to return, for errors.
        error_cls: Class of the error.

    Raises:
        MeshwrightError: ``error_cls``, when it fails with any other error, saying where.
    """
    try:
        return function(**arguments)
    except MeshwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise error_cls(
            f"The {key} function {reference} failed",
            expected=expected,
            got=f"{type(error).__name__}: {error} ({where_raised(error)})",
            fix=f"correct {'' if key.startswith('-') else f'{key}.args or '}the function; --traceback shows where",
        ) from error


def call_model_reference(function: Callable[..., Any], reference: str, arguments: Mapping[str, Any], key: str) -> Any:
    """Call a function that builds a model; see :func:`call_reference`.

    Raises:
        ModelError: When it fails or returns something else.
    """
    model = call_reference(function, reference, arguments, key=key, expected="a torch.nn.Module", error_cls=ModelError)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"The {key} function {reference} returned no model",
            expected="a torch.nn.Module",
            got=type(model).__name__,
            fix="return the model",
        )
    return model


def _not_imported(module_name: str, where: str, error: BaseException) -> ConfigError:
    absent = isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or "?")
    return ConfigError(
        f"{where}: the module {module_name!r} cannot be imported",
        expected=f"a module in {sys.path[0]} or an installed one" if absent else "a module that imports",
        got=f"{type(error).__name__}: {error}{'' if absent else f' ({where_raised(error)})'}",
        fix="correct the name, or install the package" if absent else "correct the module; --traceback shows all",
    )


def where_raised(error: BaseException) -> str:
    """Return the file and line in which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename == __file__:
        return "by the call itself"
    return f"{frames[-1].filename}, line {frames[-1].lineno}"


# --- A user's own functions during ``meshwright train``: after steps, validations and checkpoints, and at the end

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
