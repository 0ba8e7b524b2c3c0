"""Every relative link of the manual and the README leads to a file that is there, and to a heading in it."""

import functools
import posixpath
import re

import pytest

from tests.docs.pages import DOCS, ROOT, blocks, hooks, pages, without_code

_LINK = re.compile(r"\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)?\]\(([^)\s]+)\)")


@functools.cache
def anchors(page):
    """The anchors of a page's headings, as mkdocs-material and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", pages()[page], flags=re.MULTILINE | re.DOTALL)
    found = []
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        explicit = re.search(r"\{ #([\w-]+) \}", heading)
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\{.*\}", "", heading).lower()).strip()
        found.append(explicit[1] if explicit else re.sub(r"\s", "-", words))
    return found


def links(page):
    found = _LINK.findall(without_code(pages()[page]))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        assert there in pages() or there == "docs/images/house.svg" or (ROOT / there).exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page}: {target}; the headings there are {anchors(there)}"


def test_every_page_is_in_the_contents():
    contents = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/]+\.md", contents))
    assert {page.removeprefix("docs/") for page in pages() if page.startswith("docs/")} <= listed


def test_pictures_are_small_and_used():
    text = "".join(pages().values())
    for picture in (DOCS / "images").iterdir():
        assert picture.stat().st_size < 200_000, picture.name
        assert picture.name in text, f"{picture.name} is on no page"


def test_quoted_errors_are_those_of_the_code():
    """Headings of the page on troubleshooting are what the program says, but for numbers and names."""
    foreign = ("torch.OutOfMemoryError", "Watchdog caught", "It hangs", "Losses differ", "The loss is higher")
    foreign += ("Expected to have finished reduction", "got mixed torch.Tensor and DTensor", "setStorage: ")
    foreign += ("FSDP does not support deepcopy",)
    code = " ".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    headings = re.findall(r"^### (.+)$", pages()["docs/troubleshooting.md"], re.MULTILINE)
    assert len(headings) > 30
    for heading in headings:
        if heading.startswith(foreign):
            continue
        parts = re.split(
            r"\brank \d+\b|\d+ s\b|^The (?:model|optimizer|strategy|installed code) (?=differs)|SIGKILL", heading
        )
        assert all(part.strip() in code for part in parts), heading


def test_every_key_of_every_method_is_explained():
    text = pages()["docs/methods.md"]
    assert hooks("methods_page").UNEXPLAINED not in text
    assert len(re.findall(r"^## `", text, re.MULTILINE)) == len(hooks("methods_page").known_methods())


def test_the_house_is_drawn_as_it_is_built():
    from tests.house import FLOORS

    assert [set(floor) for floor in hooks("house").floors()] == FLOORS
    assert all(f">{room}<" in hooks("house").picture() for floor in FLOORS for room in floor)


def test_blocks_name_their_language():
    bare = [block.where for page in pages() for block in blocks(page, "") if page.startswith("docs/api")]
    assert not bare


def cells(row):
    return len(re.findall(r"(?<!\\)\|", row)) - 1


@pytest.mark.parametrize("page", pages())
def test_tables_have_as_many_columns_in_every_row(page):
    """A line below the headings with another number of columns makes text of the table."""
    for table in re.findall(
        r"(?:^\|.*\n)+", re.sub(r"^```.*?^```", "", pages()[page], flags=re.M | re.S), re.MULTILINE
    ):
        rows = table.splitlines()
        assert re.fullmatch(r"[|: -]+", rows[1]), f"{page}: {rows[0]}"
        assert {cells(row) for row in rows} == {cells(rows[0])}, f"{page}: {rows[0]}"


def test_every_tick_of_ours_has_a_test_or_a_page():
    rows = [line.strip("| ").split(" | ") for line in pages()["docs/features.md"].splitlines() if line.startswith("|")]
    header, _, *features = rows
    own = header.index("Meshwright") - len(header)
    assert len(features) > 20
    for row in features:
        if row[own] in ("✓", "~"):
            tests = re.findall(r"`(tests/[\w/]+\.py)`", row[-1])
            assert tests or _LINK.search(row[-1]), row[0]
            assert all((ROOT / test).is_file() for test in tests), row[0]
