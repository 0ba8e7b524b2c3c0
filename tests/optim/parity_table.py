"""Every optimizer on every layout and under every plugin, against one device: the tables of docs/optimizers.md.

python -m tests.optim.parity_table        # measures, and writes the tables into the page
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist

from tests.optim.contestants import BUILD
from tests.optim.sharded.layouts import layouts_of, plain, relative_differences, start_values, trained

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
STEPS = 20
LIMIT = 1e-5


def worst_by_layout(kinds=tuple(BUILD), steps=STEPS):
    """For every layout of this world and optimizer: the largest difference, of weights and of states.

    Weights relative to the distance they moved, states relative to their norm.
    """
    start, cells = start_values(), {}
    for name in kinds:
        build = BUILD[name]
        expected, _ = trained(build, plain, steps=steps)
        for layout, place in layouts_of(dist.get_world_size()).items():
            result, _ = trained(build, place, steps=steps)
            cells[layout, name] = max(relative_differences(result, expected, start).values())
    return cells


def over_ranks(answers):
    return {cell: max(answer[cell] for answer in answers) for cell in answers[0]}


def as_table(cells, heading):
    rows = list(dict.fromkeys(row for row, _ in cells))
    columns = list(dict.fromkeys(column for _, column in cells))
    lines = [f"| {heading} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        values = [f"{cells[row, column]:.0e}" if cells[row, column] else "0" for column in columns]
        lines.append(f"| {row} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def headings_of(table):
    """First cells of all rows, and of all columns."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    return [line[0] for line in lines[2:]], lines[0][1:]


def section(page, name):
    return re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", page, re.S)


def write(name, table):
    page = PAGE.read_text()
    found = section(page, name)
    PAGE.write_text(page[: found.start(1)] + table + "\n" + page[found.end(1) :])


def main():
    from tests.optim.plugin_parity import worst_by_plugin
    from tests.pool import Pool

    layouts = {}
    for world in (2, 4):
        pool = Pool(world)
        for (layout, name), value in over_ranks(pool.run(worst_by_layout)).items():
            layouts[f"{layout}, {world} ranks", name] = value
        if world == 4:
            plugins = over_ranks(pool.run(worst_by_plugin))
        pool.stop()
    for name, cells, heading in (("layouts", layouts, "layout"), ("plugins", plugins, "plugin")):
        table = as_table(cells, heading)
        write(name, table)
        print(table, end="\n\n")
    assert torch.tensor([*layouts.values(), *plugins.values()]).max() <= LIMIT


if __name__ == "__main__":
    main()
