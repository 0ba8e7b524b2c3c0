"""Class names as plain strings: how a strategy's reference finds a module's class."""

from __future__ import annotations

from collections.abc import Iterable


def names_class(reference: str, names: Iterable[str]) -> bool:
    """Whether ``reference`` (bare ``"Block"`` or qualified ``"package.module.Block"``) names one of ``names``.

    A class defined in a script is ``__main__.Block`` there and ``train.Block`` elsewhere: only its bare name counts.

    Args:
        reference: What a strategy says.
        names: Qualified names of a class and of the classes it derives from.
    """
    wanted_bare = reference.rsplit(".", 1)[-1]
    only_bare = "." not in reference or reference.startswith("__main__.")
    for name in names:
        if only_bare or name.startswith("__main__."):
            if name.rsplit(".", 1)[-1] == wanted_bare:
                return True
        elif name == reference:
            return True
    return False
