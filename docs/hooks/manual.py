"""mkdocs' hook: pages that are generated, and pages that live outside ``docs/``, with their links put right."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import api
import cli_page
import methods_page

import house

ROOT = Path(__file__).parents[2]

# Files of the repository that are pages of the manual, too.
ELSEWHERE = {
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def generated() -> dict[str, str]:
    """Every page or picture that is made from the code, by its path under ``docs/``."""
    return {
        "cli.md": cli_page.page(),
        "images/house.svg": house.picture(),
        "methods.md": methods_page.page(),
        **api.pages(),
    }


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated files and those from elsewhere."""
    from mkdocs.structure.files import File

    pages = {**generated(), **{page: (ROOT / path).read_text() for path, page in ELSEWHERE.items()}}
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_post_build(config: Any) -> None:
    """Writes the index of the search as a script, too: pages that are opened from a folder may not fetch files."""
    index = Path(config.site_dir, "search", "search_index.json")
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')}", encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points links to files outside ``docs/`` to their pages; what has none becomes text."""
    origin = {page: path for path, page in ELSEWHERE.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return relinked(markdown, origin, page.file.src_uri)


def relinked(markdown: str, origin: str, page: str) -> str:
    """Markdown of the repository's file ``origin`` with its links as they must be on ``page``, under ``docs/``."""

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        there = ELSEWHERE.get(there, there.removeprefix("docs/") if there.startswith("docs/") else "")
        if not there:
            return text
        relative = posixpath.relpath(there, posixpath.dirname(page) or ".")
        return f"[{text}]({relative}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)
