"""Send a run's figures to trackers: TensorBoard, Weights & Biases, MLflow and Trackio, which may fail without harm."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from meshwright.errors import ConfigError, did_you_mean, join_names

PROJECT = "meshwright"
"""The project of runs where no environment variable of a tracker names one."""


@dataclass(frozen=True)
class RunInfo:
    """The description of a run that a tracker is given."""

    run_dir: Path
    config: Mapping[str, Any]
    """The training file as resolved."""
    first_step: int
    """The step after which it goes on; 0 for a new one."""

    @property
    def key(self) -> str:
        """Return a name of the run that a resumed one has, too."""
        return hashlib.sha256(str(self.run_dir.absolute()).encode()).hexdigest()[:12]


class Tracker(Protocol):
    """A place for a run's figures; whatever it raises ends its part in the run, and nothing else."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Take figures of a step."""

    def file(self, path: Path) -> None:
        """Take a document, such as the plan."""

    def texts(self, samples: Sequence[tuple[str, str]], step: int) -> None:
        """Take prompts and what the model has made of them."""

    def close(self) -> None:
        """Write what is pending."""


class _TensorBoard:
    def __init__(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hide earlier events of steps that a resumed run repeats.
        self._writer = SummaryWriter(str(info.run_dir / "tensorboard"), purge_step=info.first_step + 1)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def file(self, path: Path) -> None:
        self._writer.add_text(path.name, f"```\n{path.read_text(encoding='utf-8')}\n```")

    def texts(self, samples: Sequence[tuple[str, str]], step: int) -> None:
        self._writer.add_text("samples", f"```\n{_listed(samples)}\n```", step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, info: RunInfo) -> None:
        wandb: Any = importlib.import_module("wandb")
        is_online = bool(os.environ.get("WANDB_API_KEY")) or _has_netrc_entry("api.wandb.ai")
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=info.run_dir.name,
            id=info.key,
            resume="allow",
            dir=str(info.run_dir),
            config=dict(info.config),
            mode=os.environ.get("WANDB_MODE", "online" if is_online else "offline"),
            settings=wandb.Settings(silent=True),
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def file(self, path: Path) -> None:
        kept = Path(self._run.dir) / path.name  # wandb warns of files elsewhere: later versions would not be sent
        shutil.copyfile(path, kept)
        self._run.save(str(kept), base_path=str(kept.parent), policy="now")

    def texts(self, samples: Sequence[tuple[str, str]], step: int) -> None:
        rows = [[step, prompt, text] for prompt, text in samples]
        self._run.log({"samples": self._wandb.Table(columns=["step", "prompt", "text"], data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, info: RunInfo) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        place = os.environ.get("MLFLOW_TRACKING_URI") or _mlflow_store(info.run_dir)
        self._client = mlflow.MlflowClient(tracking_uri=place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        files = None if os.environ.get("MLFLOW_TRACKING_URI") else (info.run_dir / "mlflow").absolute().as_uri()
        experiment = found.experiment_id if found is not None else self._client.create_experiment(
            name, artifact_location=files
        )  # fmt: skip
        self._run_id = self._existing(experiment, info) or self._new(experiment, info)

    def _existing(self, experiment: str, info: RunInfo) -> str | None:
        found = self._client.search_runs([experiment], f"tags.{PROJECT} = '{info.key}'", max_results=1)
        return found[0].info.run_id if found and info.first_step else None

    def _new(self, experiment: str, info: RunInfo) -> str:
        run = self._client.create_run(experiment, run_name=info.run_dir.name, tags={PROJECT: info.key})
        values = {f"{table}.{key}": value for table, keys in _tables(info.config) for key, value in keys.items()}
        parameters = [self._entities.Param(key, str(value)[:500]) for key, value in values.items()]
        self._client.log_batch(run.info.run_id, params=parameters[:100])
        return run.info.run_id

    def log(self, figures: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        found = [self._entities.Metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=found)

    def file(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def texts(self, samples: Sequence[tuple[str, str]], step: int) -> None:
        self._client.log_text(self._run_id, _listed(samples), f"samples/step-{step:08}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _mlflow_store(run_dir: Path) -> str:
    """Return where runs are kept that go to no server: a database, or files where MLflow comes without databases."""
    if importlib.util.find_spec("sqlalchemy") is not None:
        return f"sqlite:///{(run_dir / 'mlflow.db').absolute()}"
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # which it refuses otherwise of late
    return (run_dir / "mlruns").absolute().as_uri()


class _Trackio:
    def __init__(self, info: RunInfo) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._name = f"{info.run_dir.name}-{info.key}"  # runs have no other identity
        with contextlib.redirect_stdout(None):  # it greets
            self._trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=self._name, config=dict(info.config),
                resume="allow" if info.first_step else "never",
            )  # fmt: skip

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(figures), step=step)

    def file(self, path: Path) -> None:
        self._trackio.log_artifact(path, name=f"{self._name}-{path.name}", type="plan")

    def texts(self, samples: Sequence[tuple[str, str]], step: int) -> None:
        self._trackio.log({"samples": self._trackio.Markdown(f"```\n{_listed(samples)}\n```")}, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(None):
            self._trackio.finish()


_TRACKERS: dict[str, Callable[[RunInfo], Tracker]] = {
    "tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow, "trackio": _Trackio,
}  # fmt: skip


def check_trackers(names: Sequence[str], *, are_defaults: bool) -> list[str]:
    """Return the trackers that can be used; of defaults, those that are installed.

    Raises:
        ConfigError: When one is unknown, or not installed.
    """
    found = []
    for name in names:
        if name not in _TRACKERS:
            raise ConfigError(
                f"Unknown tracker {name!r}{did_you_mean(name, _TRACKERS)}",
                expected=f"run.trackers: names from {join_names(_TRACKERS)}",
                got=repr(name),
                fix="correct the name, or leave it out",
            )
        if importlib.util.find_spec(name) is not None:
            found.append(name)
        elif not are_defaults:
            raise ConfigError(
                f"The tracker {name} is not installed",
                expected=f"an importable package {name!r}",
                got="none",
                fix=f"pip install {name}, or leave it out of run.trackers",
            )
    return found


class Trackers:
    """All trackers of a run, on rank 0; one that fails is reported once, and left alone from then on."""

    def __init__(self, names: Sequence[str], info: RunInfo) -> None:
        self._names, self._open = names, dict[str, Tracker]()
        self._begin(info)

    def _begin(self, info: RunInfo) -> None:
        self._info = info
        for name in self._names:
            self._call(name, functools.partial(self._begin_one, name))

    def _begin_one(self, name: str) -> None:
        self._open[name] = _TRACKERS[name](self._info)

    def log(self, figures: Mapping[str, object], step: int) -> None:
        """Send figures; those that are no finite numbers are left out."""
        finite = {
            name: float(value)
            for name, value in figures.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        self._all(lambda each: each.log(finite, step))

    def file(self, path: Path) -> None:
        """Send a document."""
        self._all(lambda each: each.file(path))

    def texts(self, samples: Sequence[tuple[str, str]], step: int) -> None:
        """Send prompts and what the model has made of them."""
        self._all(lambda each: each.texts(samples, step))

    def rewind(self, step: int) -> None:
        """Begin anew after a step, for the steps behind it are repeated."""
        self.close()
        self._begin(replace(self._info, first_step=step))

    def close(self) -> None:
        """Write what is pending."""
        self._all(lambda each: each.close())
        self._open.clear()

    def _all(self, call: Callable[[Tracker], None]) -> None:
        for name, each in list(self._open.items()):
            self._call(name, functools.partial(call, each))

    def _call(self, name: str, call: Callable[[], None]) -> None:
        try:
            with _quiet():
                call()
        except Exception as error:  # trackers have errors of every kind, and none is a reason to stop
            self._open.pop(name, None)
            text = f"the tracker {name} has failed ({type(error).__name__}: {error}); training goes on without it"
            print(f"meshwright: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what trackers print off standard output, which belongs to the run."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _listed(samples: Sequence[tuple[str, str]]) -> str:
    return "\n\n".join(f"> {prompt}\n{text}" for prompt, text in samples)


def _tables(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, table) for name, table in config.items() if isinstance(table, Mapping)]


def _has_netrc_entry(host: str) -> bool:
    with contextlib.suppress(Exception):  # absent, or not readable
        import netrc

        return netrc.netrc().authenticators(host) is not None
    return False
