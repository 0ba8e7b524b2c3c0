"""Every python block of the README and the manual runs as it stands; other systems' code is compiled."""

import ast

import pytest

import meshwright as mw
from meshwright.methods import resolve
from tests.docs.pages import blocks, pages
from tests.docs.running import run_pages

# Ranks that a page's meshes need, where these are not 2. A 0: nothing in it needs processes.
RANKS = {
    "docs/methods.md": 0, "docs/outer_steps.md": 4, "docs/parallelism.md": 4, "docs/planner.md": 0,
    "docs/predictions.md": 0, "docs/recompute.md": 0,
}  # fmt: skip
# Pages of many strategies; docs/fairseq.md has an outer step too, and every strategy in them is read below.
LONG = {"docs/compile.md", "docs/outer_steps.md", "docs/parallelism.md"}
# tests/seeds/test_bmtrain.py runs it on a tensor group, and looks at what it learns.
TESTED_THERE = {"docs/bmtrain.md": "class Feedforward("}


def ours(page):
    there = TESTED_THERE.get(page)
    mine = [block for block in blocks(page, "python") if not block.is_foreign]
    return [block for block in mine if there is None or there not in block.code]


PAGES = [page for page in pages() if page == "README.md" or (page.startswith("docs/") and ours(page))]
FOREIGN = [block for page in pages() for block in blocks(page, "python") if block.is_foreign]


@pytest.fixture(scope="module")
def run(ranks):
    """``run(page)``: why a page's code fails, and what it prints on rank 0; all of one size run in one call."""
    done = {}

    def outcome(page):
        if page not in done:
            size, is_long = RANKS.get(page, 2), page in LONG
            listed = [each for each in PAGES if RANKS.get(each, 2) == size and (each in LONG) == is_long]
            code = {each: ours(each) for each in listed}
            results = ranks(size).run(run_pages, code) if size else [run_pages(code)]
            for each in listed:
                failures = [found[each] for found, _ in results if each in found]
                done[each] = failures, results[0][1][each]
        return done[page]

    return outcome


@pytest.mark.parametrize("page", [pytest.param(each, marks=pytest.mark.long if each in LONG else ()) for each in PAGES])
def test_the_code_of_a_page_runs(run, page):
    failures, _ = run(page)
    assert not failures, failures[0]


def test_the_readme_prints_what_it_says(run):
    assert "fsdp + checkpoint + amp_native(dtype='bf16')" in run("README.md")[1]


@pytest.mark.parametrize("block", FOREIGN, ids=lambda block: f"{block.where} {block.title}")
def test_other_systems_code_compiles(block):
    compile(block.code, block.where, "exec")


def written_strategies():
    """Every list that is passed as ``strategy=`` and consists of plain values, with where it stands."""
    for page in PAGES:
        for block in ours(page):
            for node in ast.walk(ast.parse(block.code)):
                if isinstance(node, ast.keyword) and node.arg == "strategy" and isinstance(node.value, ast.List):
                    yield f"{block.where}+{node.value.lineno}", ast.literal_eval(node.value)


@pytest.mark.parametrize(("where", "source"), written_strategies())
def test_every_strategy_is_one_that_the_law_allows(where, source):
    if "freeze" in str(source):  # a reader's own
        return
    strategy = mw.Strategy(source)
    mode = strategy.get("parallel_mode")
    world = 1
    for _, size in mode.axes if mode else ():
        world *= size
    assert resolve(strategy, max(world, 2)).strategy


def test_every_page_is_looked_at():
    assert len(PAGES) >= 20
    assert all(blocks(page, "python") for page in RANKS)
