"""Fixtures: pools of living gloo workers, shared by every test across ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from meshwright import runtime
from tests import on_device
from tests.pool import Pool

# Files that take 15 seconds and more begin: with two processes none is left over for one of them at the end.
SLOWEST = (
    "planner/search/test_search.py", "planner/test_bytes.py", "parity/test_born_sharded.py", "cli/test_adapters.py",
    "cli/test_seeing.py", "cli/test_train.py", "planner/test_constraint_laws.py", "methods/test_expert_parallel.py",
    "cli/test_finetune.py", "planner/measure/test_dry_runs.py", "training/test_born.py", "test_house.py",
    "training/test_accelerate.py", "methods/test_tensor_parallel.py", "methods/test_pipeline_parallel.py",
    "docs/test_python.py", "fuzz/test_strategies.py", "faults/test_start.py", "examples/test_gpt2_train.py",
    "compat/colossalai/test_booster.py", "compat/colossalai/test_booster_pipeline.py", "methods/test_containers.py",
    "planner/test_search_laws.py", "compat/bmtrain/test_bmtrain.py", "methods/test_birth.py",
)  # fmt: skip

# Shared machines stall now and then: a slow draw is no failure.
ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("any", ANY)
settings.register_profile("same", ANY, derandomize=True)  # a change is judged by the examples of the change before it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-s", type=float, default=0.0, help="seconds for each parser; 0 tries a few inputs")
    parser.addoption("--kills", type=int, default=200, help="how many random kills make faults tries")
    parser.addoption("--parity", choices=("some", "all"), default="some", help="how much of the parity matrices to run")
    parser.addoption("--seed", type=int, default=0, help="of the numbers that tests draw")
    parser.addoption("--device", choices=on_device.DEVICES, default="cpu", help="run those tests that a GPU can run")


def pytest_configure(config: pytest.Config) -> None:
    why_not = on_device.why_not(config.getoption("--device"))
    if why_not is not None:
        raise pytest.UsageError(why_not)
    gc.disable()  # until all is collected: what is imported stays
    settings.load_profile("any" if config.getoption("--parity") == "all" else "same")
    config.addinivalue_line("markers", "long: only with --parity=all, as in make parity; a shorter test does like it")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--device``, do not read files of which nothing runs: a machine with GPUs may lack what they import."""
    if config.getoption("--device") == "cpu" or collection_path.suffix != ".py":
        return None
    return None if on_device.holds(collection_path) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {config.rootpath / "tests" / name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if config.getoption("--parity") != "all":
        _keep(config, items, lambda item: not item.get_closest_marker("long"))
    device = config.getoption("--device")
    if device != "cpu":
        _keep(config, items, lambda item: _runs_on(device, item))


def _runs_on(device: str, item: pytest.Item) -> bool:
    has_ranks = "ranks" in getattr(item, "fixturenames", ())
    return on_device.runs_there(device, item.path, item.name.partition("[")[0], has_ranks=has_ranks)


def _keep(config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = filter(wanted, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    # No collection during the tests looks at the modules again.
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show where workers crashed in tests that passed when they were run again: see ``Pool.run``."""
    for report in terminalreporter.stats.get("passed", ()):
        if "Fatal Python error" in report.capstderr:
            terminalreporter.section(f"a worker crashed in {report.nodeid}")
            terminalreporter.write_line(report.capstderr)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Pool]]:
    """``ranks(n).run(function, …)`` runs a module-level function on n gloo ranks."""
    pools: dict[int, Pool] = {}
    device = request.config.getoption("--device")

    def pool(size: int) -> Pool:
        return pools.setdefault(size, Pool(size, device=device))

    yield pool
    for each in pools.values():
        each.stop()


@pytest.fixture(autouse=True)
def draws_the_same(request: pytest.FixtureRequest) -> None:
    """Draw the same numbers in each run, as ranks do: what is too narrow a tolerance shows on the first day."""
    runtime.seed_everything(request.config.getoption("--seed"))


@pytest.fixture(autouse=True)
def on_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--device``, what a test without ranks makes is on that device."""
    device = request.config.getoption("--device")
    with contextlib.ExitStack() as stack:
        if device != "cpu" and "ranks" not in request.fixturenames:
            stack.enter_context(on_device.default_device(device))
        yield


@pytest.fixture(autouse=True)
def leaves_no_world() -> Iterator[None]:
    """Worlds are made on ranks: one that stays in this process would turn later tests red, in some orders."""
    yield
    distributed = sys.modules.get("torch.distributed")  # not imported here: many tests need no torch
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this test made a world in pytest's own process; ranks(1).run(function) makes it in another one")
