"""The tables of docs/optimizers.md hold: each cell is measured again (see parity_table.py)."""

import pytest

from tests.optim.parity_table import LIMIT, PAGE, headings_of, over_ranks, section, worst_by_layout
from tests.optim.plugin_parity import PLUGINS, worst_by_plugin


@pytest.mark.parametrize("world", [2, 4])
def test_layouts(ranks, world):
    cells = over_ranks(ranks(world).run(worst_by_layout))
    print(cells)
    assert {cell: value for cell, value in cells.items() if not value <= LIMIT} == {}
    rows, columns = headings_of(section(PAGE.read_text(), "layouts").group(1))
    assert {f"{layout}, {world} ranks" for layout, _ in cells} <= set(rows)
    assert {name for _, name in cells} == set(columns)


def test_plugins(ranks):
    cells = over_ranks(ranks(4).run(worst_by_plugin))
    print(cells)
    assert {cell: value for cell, value in cells.items() if not value <= LIMIT} == {}
    rows, columns = headings_of(section(PAGE.read_text(), "plugins").group(1))
    assert rows == list(PLUGINS)
    assert {name for _, name in cells} == set(columns)
