"""One self-contained HTML page about plans: it draws the JSON that it carries, and loads nothing."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from meshwright.errors import ConfigError


def page(document: Mapping[str, Any]) -> str:
    """The page of a document; all its figures are in its element ``#plans``, which holds the document as it is.

    Args:
        document: Of :func:`~meshwright.planner.explain.found_document`.

    Raises:
        ConfigError: When plotly, whose script draws the figures, is not installed.
    """
    parts = {
        "title": html.escape(_title(document)),
        "style": _part("page.css"),
        "plotly": _plotly(),
        # The one way out of a script element is its closing tag.
        "plans": json.dumps(document, indent=1).replace("<", "\\u003c"),
        "script": _part("page.js"),
    }
    return re.sub("%%([a-z]+)%%", lambda place: parts[place.group(1)], _part("page.html"))


def _title(document: Mapping[str, Any]) -> str:
    cluster = document["cluster"] or {}
    where = f" on {cluster['num_devices']} x {cluster['device']}" if cluster else ""
    return f"{document['model'].get('name', 'Model')}{where}"


def _part(name: str) -> str:
    return (resources.files("meshwright.planner.explain") / name).read_text()


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(
            "The page's figures are drawn by plotly, which is not installed",
            expected="an importable package 'plotly'",
            got=str(error),
            fix="pip install 'meshwright[report]', or leave --html out",
        ) from None
    return get_plotlyjs()
