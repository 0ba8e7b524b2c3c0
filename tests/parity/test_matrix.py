"""Every model under every layout of tensor and pipeline axes against one plain process.

Ten steps from the same weights on the same batches. SGD with momentum: final weights differ by less than 1e-5 of the
distance they moved, gradient norms by less than 1e-5. AdamW: losses within 1e-4. ``make parity`` runs the whole matrix
and prints the largest differences; without ``--parity=all`` one is left that no other test has.
"""

import pytest

from tests.parity import runs
from tests.parity.layouts import LAYOUTS
from tests.parity.models import MODELS

SHORT = {("t5", "pipeline 2, zbv")}


def cases():
    for layout in LAYOUTS:
        for name in MODELS:
            marks = [] if (name, layout) in SHORT else [pytest.mark.long]
            yield pytest.param(name, layout, marks=marks, id=f"{layout}-{name}")


@pytest.mark.parametrize(("name", "layout"), cases())
def test_parity(ranks, record_property, name, layout):
    every = ranks(LAYOUTS[layout].world).run(runs.train_both, name, layout)
    record_property("apart", runs.check(name, layout, every))
