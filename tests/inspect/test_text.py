from meshwright.inspect import format_summary, inspect_model
from tests import tiny


def test_columns_are_aligned_and_nothing_is_cut_off():
    line = {"name": "a", "shape": (2, 3), "max": 1.0, "min": -123456.78, "std": 0.00004, "mean": 0.5}
    long = {**line, "name": "layers.0.some.long.name", "shape": (123456, 123456, 123456), "std": 12.0}
    text = format_summary([{**line, "grad_std": None, "grad_mean": None}, {**long, "grad_std": 0.1, "grad_mean": 2.0}])
    assert text.splitlines() == [
        "name                     shape                        max           min      std    mean  grad_std  grad_mean",
        "a                        (2, 3)                    1.0000  -123456.7800   0.0000  0.5000      None       None",
        "layers.0.some.long.name  (123456, 123456, 123456)  1.0000  -123456.7800  12.0000  0.5000    0.1000     2.0000",
    ]


def test_nothing_and_joined_summaries():
    assert format_summary([]).split() == ["name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean"]
    model = tiny.Mlp()
    text = format_summary(inspect_model(model, "first.*") + inspect_model(model, "*last.bias"))
    assert [line.split()[0] for line in text.splitlines()] == ["name", "first.weight", "first.bias", "last.bias"]
