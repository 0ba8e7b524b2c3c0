"""Run ``meshwright plan`` and ``meshwright compare``: predict, rank, explain and compare strategies."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.cli.adapters import parse_lora, with_adapters
from meshwright.cli.references import (
    call_model_reference,
    call_reference,
    find_modules_beside,
    resolve_reference,
    takes,
)
from meshwright.cli.run_files import check_writable, write
from meshwright.cli.train_config import AdapterTable
from meshwright.cost import Cluster, find_cluster
from meshwright.errors import ConfigError, MeshwrightError, ModelError, readable_bytes
from meshwright.methods.base import torch_dtype
from meshwright.nn import is_on_meta
from meshwright.nn.batches import usual_input_format
from meshwright.planner import ModuleModel, PlannedModel, PlanRequest, known_models
from meshwright.planner.explain import (
    Difference,
    RunLength,
    changed_circumstances,
    comparison_document,
    diff,
    difference_table,
    entries_diff,
    entries_table,
    page,
    plan_entry,
    ranked_table,
    read_document,
    reasons,
    trace,
    why,
)
from meshwright.planner.plan_request import named_model
from meshwright.planner.plans import Plan
from meshwright.planner.search import Found
from meshwright.planner.workload import token_batch
from meshwright.runtime.terminal import PlainConsole
from meshwright.strategy import Strategy, read_size

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FAMILIES = ("gpt", "llama", "mixtral")
_TYPES = ("fp32", "bf16", "fp16")  # as ``model.dtype`` of a training file
_COUNT = re.compile(r"(\d+\.?\d*(?:e\+?\d+)?|\.\d+) ?([kmgbt]?)", re.IGNORECASE)
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Subjects:
    """Options that name the model, the cluster and the batch to plan for."""

    model: str
    cluster: str
    global_batch: int
    seq: int | None = None
    sample: str | None = None
    loss: str | None = None
    memory_limit: str | None = None
    lora: str | None = None
    dtype: str | None = None

    def request(self, **wanted: Any) -> PlanRequest:
        """Return a request for plans with the given wants, such as ``strategy`` or ``objective``.

        Raises:
            ConfigError, ModelError: Naming the option.
        """
        cluster, limit = find_cluster(self.cluster), read_size(self.memory_limit, "--memory-limit")
        adapter = parse_lora(self.lora) if self.lora is not None else None
        model = self._model(cluster)
        if adapter is not None:
            model = _adapted(model, adapter, self.model)
        return PlanRequest(model, cluster, self.global_batch, memory_limit=limit, **wanted)

    def _model(self, cluster: Cluster) -> PlannedModel:
        if is_reference(self.model):
            return self._module(cluster)
        given = [f"--{name}" for name in ("sample", "loss") if getattr(self, name) is not None]
        if given:
            raise ConfigError(
                "A model by its name has its own samples and loss",
                expected="--sample and --loss beside --model MODULE:FUNCTION alone",
                got=f"--model {self.model} with {' and '.join(given)}",
                fix=f"leave out {' and '.join(given)}",
            )
        return named_model(self.model, self.seq, self._dtype or torch.float32)

    @property
    def _dtype(self) -> torch.dtype | None:
        if self.dtype not in (None, *_TYPES):
            raise ConfigError(
                "--dtype is no type of parameters",
                expected=f"one of {', '.join(_TYPES)}",
                got=repr(self.dtype),
                fix="name one of them, or leave it out",
            )
        return None if self.dtype is None else torch_dtype(self.dtype)

    def _module(self, cluster: Cluster) -> ModuleModel:
        """Return the module that a function builds, on ``meta`` unless the cluster's devices are CPUs."""
        find_modules_beside(Path.cwd())
        if (self.seq is None) == (self.sample is None):
            raise ConfigError(
                "A module needs a sample",
                expected="--seq-len for a model that takes token ids, or --sample MODULE:FUNCTION that returns a batch",
                got="neither" if self.seq is None else "both",
                fix="give one of them",
            )
        function = resolve_reference(self.model, "--model")
        on_meta = not cluster.device.is_host
        with torch.device("meta" if on_meta else "cpu"):
            arguments = {"seq_len": self.seq} if self.seq is not None and takes(function, "seq_len") else {}
            module = call_model_reference(function, self.model, arguments, "--model")
            module = module if self._dtype is None else module.to(self._dtype)
        batch = token_batch(self.seq) if self.seq is not None else self._sample()
        loss = resolve_reference(self.loss, "--loss") if self.loss is not None else None
        return ModuleModel(self.model, module, batch, loss, usual_input_format(batch), seq=self.seq)

    def _sample(self) -> Any:
        assert self.sample is not None
        function = resolve_reference(self.sample, "--sample")
        return call_reference(function, self.sample, {}, key="--sample", expected="a batch", error_cls=ModelError)


def _adapted(model: PlannedModel, adapter: AdapterTable, name: str) -> ModuleModel:
    """Return the model with adapters around it."""
    if not isinstance(model, ModuleModel):
        raise ConfigError(
            "Adapters go around modules, and this model is known by its dimensions alone",
            expected="--lora beside --model hf:PATH of a config.json, or MODULE:FUNCTION",
            got=f"--model {name}",
            fix="name the folder of the model, or its config.json: hf:path/to/folder",
        )
    on_meta = is_on_meta(model.module)
    module = copy.deepcopy(model.module) if on_meta else model.module  # a known model is shared with other plans
    with torch.device("meta") if on_meta else nullcontext():
        # Without its dimensions: the formulas of a family know no adapters.
        return dataclasses.replace(model, module=with_adapters(module, adapter, "--lora"), shape=None)


def is_reference(model: str) -> bool:
    """Return whether a model is ``MODULE:FUNCTION``, and not a family with its dimensions."""
    name = model.partition(":")[0]
    return bool(_REFERENCE.fullmatch(model)) and name not in (*_FAMILIES, "hf", *known_models())


# --- ``meshwright plan``


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``meshwright plan``."""

    subjects: Subjects
    strategy: str | None = None
    """Text, or the path of a JSON file."""
    num_micro_batches: int | None = None
    objective: str = "tokens_per_s"
    excluded: tuple[str, ...] = ()
    included: tuple[str, ...] = ()
    top: int = 10
    as_json: bool = False
    html: Path | None = None
    trace: Path | None = None
    save: Path | None = None
    headroom: float | None = None
    limit_s: float | None = None
    tokens: str | None = None  # of a whole run: a number, or one such as 15T
    steps: int | None = None  # of a whole run

    def request(self) -> PlanRequest:
        """Return the request.

        Raises:
            MeshwrightError: Naming what is wrong.
        """
        for option, path in (("--html", self.html), ("--trace", self.trace), ("--save", self.save)):
            check_writable(option, path)
        # What is not given has the defaults of the request, whose modules would slow down --help.
        wanted: dict[str, Any] = {} if self.headroom is None else {"headroom": self.headroom}
        if self.limit_s is not None:
            wanted["limit_s"] = self.limit_s or None
        if self.tokens is not None or self.steps is not None:
            wanted["length"] = RunLength(_number_of_tokens(self.tokens), self.steps)
        return self.subjects.request(
            **wanted,
            strategy=None if self.strategy is None else Strategy(self.strategy),
            num_micro_batches=self.num_micro_batches,
            objective=self.objective,
            excluded=self.excluded,
            included=[each for text in self.included for each in _constraints_line(text)],
            top=self.top,
        )


def _number_of_tokens(text: str | None) -> float | None:
    """Read a number of tokens as people write it: ``300B``, ``1.4T``, ``2e9``."""
    if text is None:
        return None
    found = _COUNT.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if found is None:
        raise ConfigError(
            "--tokens is no number of tokens",
            expected="a number, or one in thousands (K), millions (M), billions (B) or trillions (T), such as 15T",
            got=repr(text),
            fix="correct the number",
        )
    return float(found[1]) * _UNITS[found[2].upper()]


def _constraints_line(text: str) -> tuple[Any, ...]:
    """Return a method's name, or with keys as in the text of a strategy, or as tables show it."""
    return Strategy(text).methods if "(" in text or " " in text.strip() else (text,)


def plan(options: PlanOptions) -> int:
    """Search or predict plans, and print and write them as the options ask; return the exit status.

    Raises:
        MeshwrightError: When there is no plan, saying why.
    """
    with redirect_stdout(sys.stderr):  # what a model prints is no part of the result
        request = options.request()
        with _progress() as progress:
            found = request.found(progress)
    if not options.as_json:
        _show(request, found)
    with redirect_stdout(sys.stderr):
        with _progress("asking what would change it"):
            what_ifs = request.what_ifs(found)
        document = request.document(found, what_ifs) if options.as_json or options.html is not None else {}
    if options.as_json:
        print(json.dumps(document, indent=2))
    elif what_ifs:
        PlainConsole().print(changed_circumstances(what_ifs))
    if options.html is not None:
        write("--html", options.html, page(document))
    if options.trace is not None:
        write("--trace", options.trace, json.dumps(trace(found.plans[0])))
    if options.save is not None:
        write("--save", options.save, found.plans[0].complete_strategy.to_json() + "\n")
    return 0


def _show(request: PlanRequest, found: Found) -> None:
    """Print the plans and the reasons at once: what comes behind takes some seconds more."""
    console = PlainConsole()
    console.print(ranked_table(found.plans, _title(request, found), console.width, request.length))
    console.print(reasons(why(found, request.length), building=found.plans[0]))
    if machine := _measured_machine(request):
        console.print(machine, markup=False, highlight=False)
    for gap in found.plans[0].gaps:
        console.print(f"Not predicted: {gap}", markup=False, highlight=False)
    if base := _wide_base(request.model):
        console.print(base, markup=False, highlight=False)
    sys.stdout.flush()


def _title(request: PlanRequest, found: Found) -> str:
    cluster = request.cluster
    where = f"{cluster.num_devices} x {cluster.device.name}"
    return f"{request.model.name} on {where}, {request.global_batch} samples a step, in {found.seconds:.1f} s"


def _wide_base(model: PlannedModel) -> str:
    """Say that a frozen base could take half the memory; empty where it does, or where most of a model is trained."""
    if not isinstance(model, ModuleModel):
        return ""
    sizes = [(each, each.numel() * each.itemsize) for each in model.module.parameters()]
    frozen = sum(size for each, size in sizes if not each.requires_grad and each.dtype == torch.float32)
    if frozen < sum(size for _, size in sizes) / 2:
        return ""
    return f"The frozen base is in fp32, {readable_bytes(frozen)} on all devices together: --dtype bf16 halves it."


def _measured_machine(request: PlanRequest) -> str:
    """Say which machine's measurements predict the seconds; empty for presets."""
    known = request.cluster.calibration
    if known is None or known.machine is None:
        return ""
    runs = f", and corrected by {known.num_runs} dry runs there" if known.num_runs else ""
    return f"Seconds are predicted from measurements of {known.machine}{runs}."


@contextmanager
def _progress(doing: str = "planning") -> Iterator[Callable[[int, int], None] | None]:
    """Show a line on the terminal's standard error during a search, so that it never mixes with the result."""
    console = PlainConsole(file=sys.stderr)
    if not console.is_terminal:
        yield None
        return
    with console.status(doing) as status:
        yield lambda done, most: status.update(f"{doing}, strategies simulated: {done:,}")


# --- ``meshwright compare``


@dataclass(frozen=True)
class CompareOptions:
    """Options of ``meshwright compare``; without subjects, the figures of saved plans are compared."""

    files: tuple[Path, ...]
    subjects: Subjects | None = None
    as_json: bool = False


def compare(options: CompareOptions) -> int:
    """Print plans side by side, and what differs from the first to each other; return the exit status.

    Raises:
        MeshwrightError: When a file cannot be read, or a strategy cannot be planned.
    """
    if len(options.files) < 2:
        raise ConfigError(
            "There is nothing to compare with",
            expected="two files or more",
            got=str(len(options.files)),
            fix="name another strategy, or another file of meshwright plan --json",
        )
    documents: list[Mapping[str, Any] | None] = []
    strategies = []
    for path in options.files:
        with _naming(path):
            text = _read(path)
            documents.append(read_document(text, str(path)))
            strategies.append(_strategy(text, documents[-1]))
    if options.subjects is None:
        entries, differences = _written(options.files, documents)
    else:
        with redirect_stdout(sys.stderr):  # what a model prints is no part of the result
            entries, differences = _planned(options.files, strategies, options.subjects)
    if options.as_json:
        print(json.dumps(comparison_document(entries, differences), indent=2))
        return 0
    console = PlainConsole()
    console.print(entries_table(entries, "Plans: " + ", ".join(path.name for path in options.files), console.width))
    for difference in differences:
        console.print(difference_table(difference))
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read",
            expected="a strategy file, or a file of meshwright plan --json",
            got=f"{type(error).__name__}: {error}",
            fix="correct the path",
        ) from None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's name into errors."""
    try:
        yield
    except MeshwrightError as error:
        if str(path) in str(error):
            raise
        what = f"{path}: {error.what}"
        raise type(error)(what, expected=error.expected, got=error.got, fix=error.fix) from error


def _strategy(text: str, document: Mapping[str, Any] | None) -> tuple[Strategy, int | None]:
    """Return a file's strategy, and the number of micro-batches of a saved plan."""
    if document is not None:
        first = document["plans"][0]
        return Strategy(json.dumps(first["strategy"])), first["num_micro_batches"]
    if not text.strip():
        raise ConfigError(
            "The file is empty",
            expected="a strategy as Strategy.save writes it; [] is plain data parallelism",
            got="nothing",
            fix="write it with meshwright plan --save",
        )
    return Strategy(text), None


def _planned(
    files: Sequence[Path], strategies: Sequence[tuple[Strategy, int | None]], subjects: Subjects
) -> tuple[list[dict[str, Any]], list[Difference]]:
    request = subjects.request()
    plans: list[Plan] = []
    for path, (strategy, num_micro_batches) in zip(files, strategies, strict=True):
        with _naming(path):
            asked = dataclasses.replace(request, strategy=strategy, num_micro_batches=num_micro_batches)
            plans += asked.planned([strategy]).plans
    subject = request.subject
    return [plan_entry(plan) for plan in plans], [diff(plans[0], plan, subject) for plan in plans[1:]]


def _written(
    files: Sequence[Path], documents: Sequence[Mapping[str, Any] | None]
) -> tuple[list[dict[str, Any]], list[Difference]]:
    """Return the first plan of every document with its saved figures, and the differences."""
    strategies = [str(path) for path, document in zip(files, documents, strict=True) if document is None]
    if strategies:
        raise ConfigError(
            "Strategies can be compared for a model on a cluster",
            expected="--model, --cluster and --batch-size, or files of meshwright plan --json",
            got=f"neither, and the strategies {', '.join(strategies)}",
            fix="name the model, the cluster and the batch",
        )
    known = [document for document in documents if document is not None]
    models = [each["model"] for each in known]
    if any(model != models[0] for model in models):
        names = "; ".join(f"{model.get('name')}, batch {model.get('global_batch')}" for model in models)
        raise ConfigError(
            "The plans are for different models or batches",
            expected="one model, with one batch and length of samples",
            got=names,
            fix="plan them for the same, or compare their strategies with --model, --cluster and --batch-size",
        )
    entries = [dict(each["plans"][0]) for each in known]
    clusters = [each.get("cluster") for each in known]
    differences = [entries_diff(entries[0], entry) for entry in entries[1:]]
    return entries, [
        _elsewhere(each, clusters[0], cluster) for each, cluster in zip(differences, clusters[1:], strict=True)
    ]


def _elsewhere(difference: Difference, here: Any, there: Any) -> Difference:
    """Add the change of the cluster, if it changes."""
    if here == there:
        return difference
    before, after = _where(here), _where(there)
    change = f"~ {before} -> {after}" if before != after else f"~ {before} -> the same devices with other figures"
    return dataclasses.replace(difference, changes=(change, *difference.changes))


def _where(cluster: Any) -> str:
    known = cluster if isinstance(cluster, Mapping) else {}
    return f"{known.get('num_devices', 'unknown')} x {known.get('device', 'devices')}"
