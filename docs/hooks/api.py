"""Generate the pages of the API: one per package, with its public names."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"

PACKAGES = {
    "meshwright": ("meshwright", "`import meshwright as mw`: every name that a training script usually needs."),
    "optim": ("meshwright.optim", "Optimizers that are right on shards, and outer steps."),
    "nn": ("meshwright.nn", "The structure of modules, batches and FSDP2 units, as methods use them."),
    "loss": ("meshwright.loss", "Losses in less memory."),
    "lr_scheduler": ("meshwright.lr_scheduler", "Warm-up and decay as a torch scheduler."),
    "store": ("meshwright.store", "Checkpoints, and files of whole models."),
    "inspect": ("meshwright.inspect", "Statistics of parameters, gradients and recorded tensors."),
    "distributed": ("meshwright.comm", "Also `meshwright.distributed`: collectives with gradients; their speed."),
    "data": ("meshwright.data", "Token files, tokenizers and the order of samples."),
    "bmtrain": (
        "meshwright.compat.bmtrain",
        "BMTrain's modules, blocks, `OptimManager`, schedules and helpers; also found where BMTrain has them.",
    ),
    "booster": ("meshwright.compat.colossalai", "Also `meshwright.booster`: ColossalAI's `Booster` and plugins."),
    "strategy": ("meshwright.strategy", "A strategy: an immutable value."),
    "methods": ("meshwright.methods", "The optimisations, one class each. Their configs: [methods](../methods.md)."),
    "cost": ("meshwright.cost", "The simulated step. Plain data; never imports torch."),
    "runtime": ("meshwright.runtime", "Processes, mesh, devices and seeds."),
}

# Names that are documented on another page, or are values without a docstring of their own.
_PARTS = {"benchmark", "booster", "distributed", "inspect", "loss", "lr_scheduler", "nn", "optim", "store", "utils"}
_METHOD_INTERNALS = {"SAMPLED", "Cut", "ExpertTrace", "PipelineEngine", "Resolved", "SampleRun", "StageOutput",
                     "TokensTrace", "TracedContext", "TracedSequence", "replacement_of"}  # fmt: skip


def exported(module: str) -> list[str]:
    """Return the names that a package's ``__init__`` gives to type checkers, without importing it."""
    path = SOURCE.joinpath(*module.split(".")[1:], "__init__.py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return sorted(alias.asname or alias.name for each in node.body for alias in each.names)
    raise ValueError(f"{path} imports nothing under TYPE_CHECKING")


def shown(package: str) -> list[str]:
    """Return the names that the page of a package explains."""
    names = [name for name in exported(PACKAGES[package][0]) if not name.startswith("__")]
    if package == "meshwright":
        return [name for name in names if name not in _PARTS]
    if package == "methods":
        return [name for name in names if name not in _METHOD_INTERNALS]
    return names


def pages() -> dict[str, str]:
    """Return the markdown of every page, by its path."""
    rows = [f"| [`{module}`]({page}.md) | {text} |" for page, (module, text) in PACKAGES.items()]
    index = [
        "# API reference",
        "",
        "Generated from the docstrings: shapes, units, errors and the sources of formulas of each name. Letters in",
        "shapes are B batch, T tokens, H features, V vocabulary; bytes are bytes, not bits or GB.",
        "",
        "| package | what is in it |",
        "|---|---|",
        *(row.replace("(../", "(../") for row in rows),
        "",
    ]
    return {"api/index.md": "\n".join(index), **{f"api/{page}.md": _page(page) for page in PACKAGES}}


def _page(page: str) -> str:
    module, text = PACKAGES[page]
    parts = [f"# {module}", "", text, ""]
    for name in shown(page):
        parts += [f"::: {module}.{name}", ""]
    return "\n".join(parts)
