"""Build or resume everything that a rank needs to train: model, optimizer, data, checkpoints and run directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.cli.adapters import adapters_of
from meshwright.cli.failures import show_messages
from meshwright.cli.ranks import check_launched
from meshwright.cli.references import Callbacks
from meshwright.cli.run_files import (
    ADAPTERS,
    CHECKPOINTS,
    CONFIG,
    MODEL_CONFIG,
    STRATEGY,
    RunLock,
    begun_run_dir,
    check_run_dir,
    default_run_dir,
    is_restart,
    known_peak_flops_per_s,
    write_document,
)
from meshwright.cli.train_corpus import Corpus
from meshwright.cli.train_data import Loaded
from meshwright.cli.train_options import Options, Prepared, prepare, unless_given
from meshwright.cli.validation import Draws, TextSamples, Validation, Writer, carried_over, open_validation
from meshwright.cost.cluster import half_peak_flops_per_s
from meshwright.data import IndexOrder, MixedOrder, RepeatedStream
from meshwright.errors import CheckpointError, ConfigError, MeshwrightError, StrategyError
from meshwright.lr_scheduler import warmup_decay
from meshwright.nn.initial_values import Recording, remember
from meshwright.runtime import (
    any_rank,
    broadcast_object,
    check_equal,
    compute_deterministically,
    first_text,
    gather_numbers,
    init_distributed,
    measured_flops_per_s,
    number_from,
    own_versions,
    print_rank,
    rank,
    same_on_every_rank,
    seed_replica,
    synchronize,
    world_size,
)
from meshwright.runtime.device import GeneratorState
from meshwright.runtime.launch import launch_id, restart_count
from meshwright.runtime.rendezvous import named_ranks
from meshwright.store import CheckpointStore, HostSnapshots, TrainingState
from meshwright.store.entries import from_plain, unwrapped
from meshwright.store.manifest import read_record, step_of
from meshwright.strategy import Strategy
from meshwright.training.accelerate import accelerate
from meshwright.training.accelerated import Accelerated

# Values that decide what comes next in the data or in the schedule: a change of them is reported on resuming.
_REPORTED_ON_RESUME = ("data", "optimizer", "run.seed", "run.batch_size", "run.steps")
_DATA = "data"  # the key in a checkpoint's extra
_SAVED_IN_CHECKPOINT = ("lr", "weight_decay", "betas", "eps", "momentum")


@dataclass
class Session:
    """State of one rank's training run between two steps."""

    options: Options
    prepared: Prepared
    run_dir: Path
    accelerated: Accelerated
    store: CheckpointStore
    snapshots: HostSnapshots | None
    """None: checkpoints alone."""
    state: TrainingState
    order: IndexOrder | RepeatedStream
    """Order of the samples of the whole run."""
    peak_flops_per_s: float | None
    """Peak of all ranks together; None when a device is not known."""
    tokens_per_sample: int | None
    """None where samples are no tokens."""
    validation: Validation | None
    """None where there are no data for it."""
    samples: TextSamples | None
    """None where no prompts are named."""
    callbacks: Callbacks
    source: str
    """What the run has begun with."""
    lock: RunLock | None
    """Keeps other runs out of ``run_dir``; None on ranks other than 0."""


def open_session(options: Options) -> Session:
    """Join the world, build everything and load the checkpoint when resuming; collective.

    Raises:
        MeshwrightError: On every rank. Nothing has been written into the run directory then.
    """
    prepared = join(lambda: _prepared(options))
    run_dir, restarted = _run_dir(options, prepared)
    data = load_data(prepared)
    store = CheckpointStore(run_dir / CHECKPOINTS, keep=prepared.config.run.keep_checkpoints)
    resumes = _resumes(options, prepared, store, restarted=restarted)
    prepared = _with_steps(prepared, data, _position(store) if resumes else _Position())
    accelerated = _accelerate(prepared, data, reads_weights=not (resumes and prepared.config.run.save_frozen))
    state, snapshots = _state(prepared, data, accelerated), _snapshots(prepared, accelerated, run_dir)
    may_resume = options.resume or restarted or prepared.config.run.resume is not None
    source = "the beginning"
    if snapshots is not None and may_resume and _restored(accelerated, store, snapshots, state):
        source = "a snapshot"
    elif resumes or (may_resume and store.newest() is not None):  # snapshots of other ranks may have become one
        source = "a checkpoint" if snapshots is None or not snapshots.have_moved else "snapshots of another layout"
        _resume(prepared, accelerated, store, state)
    validation = open_validation(prepared, data.kept_aside, accelerated, state, run_dir)
    samples = _samples(prepared, accelerated, options.file.resolve().parent)
    with same_on_every_rank():
        callbacks = Callbacks(prepared.config.run.callbacks, accelerated)
    data.start_at(state.samples_seen)
    lock = lock_run(run_dir, is_new=not (options.resume or restarted or prepared.config.run.resume))
    peak_flops_per_s, tokens = _peak_flops_per_s(accelerated.device, run_dir), data.tokens_per_sample
    _write_documents(options, prepared, run_dir, accelerated, peak_flops_per_s)
    return Session(
        options,
        prepared,
        run_dir,
        accelerated,
        store,
        snapshots,
        state,
        data.order,
        peak_flops_per_s,
        tokens,
        validation,
        samples,
        callbacks,
        source,
        lock,
    )


def _resumes(options: Options, prepared: Prepared, store: CheckpointStore, *, restarted: bool) -> bool:
    """Return whether the run goes on from a checkpoint; collective."""
    is_auto = prepared.config.run.resume is not None
    resumes = any_rank(options.resume or ((restarted or is_auto) and store.newest() is not None))
    if is_auto and not resumes and prepared.config.run.snapshot is None:
        text = f"there is no whole checkpoint in {store.directory}: the run starts from the beginning"
        print_rank(f"meshwright: {text}", file=sys.stderr, flush=True)
    return resumes


def load_data(prepared: Prepared) -> Loaded:
    """Load the training data, and what of them is kept aside; collective."""
    seed, corpus = prepared.config.run.seed, prepared.corpus
    return corpus.load(seed, prepared.config.eval.holdout) if isinstance(corpus, Corpus) else corpus.load(seed)


class _Position(NamedTuple):
    """The position at which a run goes on, and what it was trained with so far."""

    step: int = 0
    samples_seen: int = 0
    run: Mapping[str, object] = {}
    """The table of the training file."""
    contents: object = None
    """See ``Loaded.contents``."""


def _position(store: CheckpointStore) -> _Position:
    """Return where the newest checkpoint was written; the beginning where it cannot be read. Collective."""
    newest, found = store.newest(), _Position()
    if newest is not None and rank() == 0:
        with contextlib.suppress(CheckpointError):  # loading says so, and takes an earlier one
            record = read_record(newest)
            extra = from_plain(record.extra)
            run = earlier_config(extra, newest).get("run", {})
            found = _Position(record.step, record.samples_seen, run, extra.get(_DATA))
    return _Position(*broadcast_object(tuple(found)))


def _with_steps(prepared: Prepared, data: Loaded, start: _Position) -> Prepared:
    """Count ``run.epochs`` in steps; collective."""
    run, length = prepared.config.run, data.num_sequences()
    if run.epochs is None:
        return prepared
    with same_on_every_rank():
        if not length:
            raise ConfigError(
                "run.epochs needs data with a length",
                expected="files, or a data function that returns something with __len__",
                got=f"a stream of {prepared.config.data.source}",
                fix="set run.steps instead",
            )
    before, is_same = start.run.get("steps"), start.contents == list(data.contents)
    is_same &= all(start.run.get(key) == getattr(run, key) for key in ("epochs", "batch_size"))
    if isinstance(before, int) and is_same:
        steps = before  # also where batches were skipped since, which another count would take for trained ones
    else:
        left = max(run.epochs * length - start.samples_seen, 0)
        steps = start.step + math.ceil(round(left / run.batch_size, 6))
    text = f"{run.epochs:g} epochs of {length:,} sequences are {steps:,} steps"
    if start.samples_seen != start.step * run.batch_size:
        text += f", of which {start.step:,} have had {start.samples_seen:,}"
    if isinstance(data.order, MixedOrder) and isinstance(prepared.corpus, Corpus):
        seen = start.samples_seen + (steps - start.step) * run.batch_size
        epochs = zip(prepared.corpus.parts, data.order.epochs(seen), strict=True)
        text += f"; by its weight, of {', '.join(f'{part.name} {each:.2g}' for part, each in epochs)} epochs"
    print_rank(f"meshwright: {text}", file=sys.stderr, flush=True)
    config = prepared.config.model_copy(update={"run": run.model_copy(update={"steps": steps})})
    return dataclasses.replace(prepared, config=config)


def lock_run(run_dir: Path, *, is_new: bool) -> RunLock | None:
    """Lock the run's directory on rank 0 before the first file is written; collective."""
    with same_on_every_rank():
        if rank() != 0:
            return None
        lock = RunLock(run_dir)
        try:
            if is_new:  # another run may have come and gone since it was looked at
                check_run_dir(run_dir, resume=False)
        except ConfigError:
            lock.release()
            raise
        return lock


def _prepared(options: Options) -> Prepared:
    check_launched("--nproc", options.nproc)
    return prepare(options, number_from("WORLD_SIZE", 1))


def join(find: Callable[[], Prepared]) -> Prepared:
    """Find what the request names and make this process a rank; what fails on any rank is raised on all."""
    prepared, failure = None, None
    try:
        prepared = find()
    except MeshwrightError as error:
        failure = error
    if prepared is None:
        init_distributed()
    else:
        init_distributed(seed=prepared.config.run.seed, backend=prepared.backend)
    with same_on_every_rank():
        if failure is not None:
            raise failure
    if prepared is not None:
        show_messages(prepared.config.run.log_level)
        if prepared.config.run.deterministic:
            compute_deterministically()
    check_equal("The installed code", own_versions(), fix="install the same Meshwright and torch on every machine")
    assert prepared is not None
    return prepared


def _run_dir(options: Options, prepared: Prepared) -> tuple[Path, bool]:
    """Return the run's directory, and whether an earlier attempt of this launch may have saved there; collective."""
    own = prepared.run_dir or begun_run_dir(options.file)
    # An elastic agent counts the failures of its own machine only: one that joined later has seen none.
    restarted = any_rank(is_restart(own))
    if restarted and own is None:
        print_rank("meshwright: started again, from the beginning: no --out names the run", file=sys.stderr, flush=True)
    return broadcast_object(own or default_run_dir(options.file)), restarted


def _accelerate(prepared: Prepared, data: Loaded, *, reads_weights: bool) -> Accelerated:
    run, optimizer = prepared.config.run, prepared.config.optimizer
    with same_on_every_rank():
        loader_args = data.loader_args(run.batch_size, run.num_workers)
    weights = prepared.model.weights if reads_weights else None
    return accelerate(
        _model(prepared, weights),
        prepared.optimizer.build,
        data.dataset,
        **_of_the_model(prepared, data, weights),
        optim_args=prepared.optimizer.arguments,
        optim_param_func=prepared.optimizer.param_func,
        dataloader_args=loader_args,
        sample_batch=data.sample_batch,
        lr_scheduler_cls=warmup_decay,
        lr_scheduler_args={
            "num_steps": run.steps,
            "warmup_steps": optimizer.warmup_steps,
            "decay": optimizer.schedule,
            "min_lr_ratio": optimizer.min_lr_ratio,
        },
        max_grad_norm=unless_given(prepared.strategy, "grad_clip", optimizer, "max_grad_norm"),
        num_micro_batches=unless_given(prepared.strategy, "gradient_accumulation", run, "num_micro_batches"),
        time_limit=prepared.config.strategy.time_limit,
    )


def _of_the_model(prepared: Prepared, data: Loaded | None, weights: Path | None) -> dict[str, Any]:
    """Return the arguments of ``accelerate`` that a model needs, trained or not."""
    table = prepared.config.strategy
    return {
        "loss_func": prepared.model.loss_func,
        "strategy": prepared.strategy,
        "prepare_input": prepared.model.prepare_input,
        "model_input_format": prepared.model.model_input_format or (data.model_input_format if data else None),
        "loss_weight": data.loss_weight if data is not None and prepared.model.loss_func is None else None,
        "weights": weights,
        "allow_missing_weights": weights is not None and prepared.config.model.allow_missing_weights,
        "excluded": table.excluded,
        "included": table.included,
        "memory_limit": prepared.config.run.memory_limit_bytes,
        "cluster": prepared.cluster,
    }


def accelerate_trained(prepared: Prepared, data: Loaded | None, sample_batch: Any, batch_size: int) -> Accelerated:
    """Build a model that is not trained any more, without an optimizer; collective.

    Args:
        prepared: What it is. Its weights are read, if it has some.
        data: Says how it is called and its loss computed; None: by its source.
        sample_batch: For predictions.
        batch_size: Of a batch over all ranks.
    """
    weights = prepared.model.weights
    arguments = _of_the_model(prepared, data, weights)
    return accelerate(_model(prepared, weights), **arguments, sample_batch=sample_batch, batch_size=batch_size)


def _model(prepared: Prepared, weights: Path | None) -> nn.Module:
    """Build the model without memory, or whole where its code needs values; collective."""
    build = functools.partial(prepared.model.build, prepared.corpus.vocab_size, prepared.corpus.seq_len)
    if prepared.model.needs_values:
        with same_on_every_rank():
            return build()
    model, problem = _without_memory(build, allow_lacking=weights is not None)
    if any_rank(model is None):  # also an error of the user's own, which the ordinary build tells
        with same_on_every_rank():
            model = build()
        problem = first_text(problem)
        print_rank(f"meshwright: every rank builds the whole model: {problem}", file=sys.stderr, flush=True)
    elif prepared.model.notice is not None:
        print_rank(f"meshwright: {prepared.model.notice}", file=sys.stderr, flush=True)
    assert model is not None
    return model


def _without_memory(build: Callable[[], nn.Module], *, allow_lacking: bool) -> tuple[nn.Module | None, str]:
    """Build a model on meta, for ``accelerate`` to give it its values; where it cannot be, say why."""
    before, recording = GeneratorState.now(), Recording()
    try:
        with recording:
            model = build()
    except (Exception, SystemExit) as error:
        problem = f"without memory its code fails ({getattr(error, 'got', None) or error})"
    else:
        # A function that reads weights itself holds all of them in any case.
        gains = sum(parameter.nbytes * (1 if parameter.is_meta else -1) for parameter in model.parameters()) > 0
        lacking = recording.values_of(model).without_values() if not allow_lacking else []
        if gains and not lacking:
            remember(recording)
            return model, ""
        problem = "it has tensors without initial values" if lacking else "its code reads or computes the values itself"
    before.restore()
    return None, problem


def _state(prepared: Prepared, data: Loaded, accelerated: Accelerated) -> TrainingState:
    return TrainingState(
        accelerated.model,
        accelerated.optim,
        accelerated.lr_scheduler,
        strategy=accelerated.strategy.to_json(),
        extra={"config": prepared.config.model_dump_json(), _DATA: list(data.contents)},
        frozen=prepared.config.run.save_frozen,
    )


def _samples(prepared: Prepared, accelerated: Accelerated, folder: Path) -> TextSamples | None:
    if not prepared.prompts:
        return None
    corpus, table = prepared.corpus, prepared.config.eval
    assert isinstance(corpus, Corpus), "prompts of others are refused"
    # As the model is trained: plain texts are continued even if the tokenizer comes with a template.
    uses_template = corpus.chat is not None
    with same_on_every_rank():
        writer = Writer(corpus, prepared.config, folder, Draws(table.sample_tokens), uses_template=uses_template)
    return TextSamples(table, prepared.prompts, writer, accelerated)


def _snapshots(prepared: Prepared, accelerated: Accelerated, run_dir: Path) -> HostSnapshots | None:
    table = prepared.config.run.snapshot
    if table is None:
        return None
    snapshots = HostSnapshots(run_dir, table.every, max_gb=table.max_gb, neighbour=table.neighbour, beside=True)
    accelerated.plan = dataclasses.replace(accelerated.plan, num_snapshots=snapshots.num_copies)
    return snapshots


def _restored(accelerated: Accelerated, store: CheckpointStore, snapshots: HostSnapshots, state: TrainingState) -> bool:
    """Go on from the snapshots in host memory, unless there is a newer checkpoint; return whether it does."""
    now, newest = (state.extra, state.strategy), store.newest()
    least = step_of(newest) if newest is not None else 0
    info = snapshots.load(state, at_least=least, checkpoints=store.directory)
    if info is None:
        return False
    state.extra, state.strategy = carried_over(now[0], state.extra), now[1]
    copies = f", {named_ranks(info.copies_of)} from the neighbour's copy" if info.copies_of else ""
    text = f"going on after step {info.step} from the snapshots in host memory{copies}"
    print_rank(f"meshwright: {text}", file=sys.stderr, flush=True)
    return True


def _resume(prepared: Prepared, accelerated: Accelerated, store: CheckpointStore, state: TrainingState) -> None:
    now, strategy = state.extra, state.strategy
    info = store.load(state)
    then = earlier_config(info.extra, info.path)
    # The next checkpoint describes this run, not the one that was resumed.
    state.extra, state.strategy = carried_over(now, info.extra), strategy
    ranks = "" if info.world_size == world_size() else f", written by {info.world_size} ranks"
    print_rank(f"meshwright: resuming after step {info.step} from {info.path}{ranks}", file=sys.stderr, flush=True)
    changed = [*changes(then, prepared.config.model_dump(mode="json")), *changed_data(info.extra, now)]
    for line in [*changed, *_change_of_strategy(info.strategy, accelerated.strategy, prepared.strategy is None)]:
        print_rank(f"meshwright: since then {line}", file=sys.stderr, flush=True)
    if not info.rng_restored:
        # The saved generators belong to another number of ranks: reseed, so that dropout masks do not repeat.
        seed_replica(prepared.config.run.seed + info.step, accelerated.replica)


def earlier_config(extra: object, where: object) -> dict[str, dict[str, object]]:
    """Return the tables of the training file with which a checkpoint was written; empty if it has none.

    Raises:
        CheckpointError: When what it has is no training file.
    """
    try:
        then = json.loads(extra.get("config", "{}"))  # type: ignore[attr-defined]
        if not isinstance(then, dict) or not all(isinstance(table, dict) for table in then.values()):
            raise TypeError("no tables of keys")
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} does not say how it was trained",
            expected="the training file, as meshwright train keeps it in a checkpoint",
            got=f"{type(error).__name__}: {error}",
            fix="resume with the program that wrote it, or from another checkpoint",
        ) from error
    return then


def changes(then: dict[str, dict[str, object]], now: dict[str, dict[str, object]]) -> list[str]:
    """Return one line for each key whose change matters to a resumed run."""
    lines = []
    for table, values in now.items():
        for key, value in values.items():
            name = f"{table}.{key}"
            before = then.get(table, {}).get(key)
            if before != value and (table in _REPORTED_ON_RESUME or name in _REPORTED_ON_RESUME):
                stays = "; the checkpoint's value stays in use" if key in _SAVED_IN_CHECKPOINT else ""
                lines.append(f"{name} has changed from {before!r} to {value!r}{stays}")
    return lines


def changed_data(then: object, now: Mapping[str, Any]) -> list[str]:
    """Return one line for each source whose content is another than when a checkpoint was written, by their extras.

    Other numbers of sources are a change of the training file; checkpoints of earlier versions do not say what they
    were trained on.
    """
    before, lines = then.get(_DATA) if isinstance(then, Mapping) else None, []
    if not isinstance(before, list) or len(before) != len(now[_DATA]):
        return []
    for old, new in zip(before, now[_DATA], strict=True):
        if isinstance(old, Mapping) and old != new | {"name": old.get("name")}:
            before_now = old.get("sequences"), new["sequences"]
            what = "{} sequences then, {} now" if before_now[0] != before_now[1] else "{} sequences, of other content"
            text = f"the data of {new['name']} have changed ({what.format(*before_now)})"
            lines.append(f"{text}: of this epoch some may be seen twice, and others not")
    return lines


def _change_of_strategy(then: str, now: Strategy, planned: bool) -> list[str]:
    try:
        before = str(Strategy(then))
    except StrategyError:  # another version wrote it: it is only shown
        before = then
    ranks = f"{world_size()} ranks" if world_size() > 1 else "one rank"
    why = f", planned anew for {ranks}" if planned else ""
    return [f"the strategy has changed from {before} to {now}{why}"] if before != str(now) else []


def _write_documents(
    options: Options, prepared: Prepared, run_dir: Path, accelerated: Accelerated, peak_flops_per_s: float | None
) -> None:
    adapters = adapters_of(accelerated.model)
    with same_on_every_rank():
        if rank() == 0:
            config = {
                "file": str(options.file.resolve()),
                "ranks": world_size(),
                "launch": launch_id(),
                "peak_flops_per_s": peak_flops_per_s,
                **prepared.config.model_dump(mode="json"),
            }
            write_document(run_dir / CONFIG, json.dumps(config, indent=2) + "\n")
            write_document(run_dir / STRATEGY, accelerated.strategy.to_json() + "\n")
            if adapters is not None:
                write_document(run_dir / ADAPTERS, adapters)
            elif (model_config := _transformers_config(accelerated.model)) is not None:
                write_document(run_dir / MODEL_CONFIG, model_config)


def _transformers_config(model: nn.Module) -> str | None:
    """Return the ``config.json`` that ``save_pretrained`` would write; None for models of other libraries."""
    model = unwrapped(model)
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_diff_dict"):
        return None
    # fully_shard has put a class of its own before the model's.
    own_class = next(each for each in type(model).__mro__ if not issubclass(each, FSDPModule))
    found = {**config.to_diff_dict(), "architectures": [own_class.__name__]}
    found.pop("use_cache", None)  # off for training only
    return json.dumps(found, indent=2, default=str) + "\n"


def _peak_flops_per_s(device: torch.device, run_dir: Path) -> float | None:
    if device.type == "cuda":
        own = half_peak_flops_per_s(torch.cuda.get_device_name(device))
    else:
        known = broadcast_object(known_peak_flops_per_s(run_dir, world_size()) if rank() == 0 else None)
        if known is not None:
            return float(known)
        # All ranks measure at once: they share the machine while they train, too.
        synchronize()
        own = measured_flops_per_s(device, 0.1 if restart_count() == 0 else 0.0)  # a restart does not wait for it
    return None if any_rank(own is None) else sum(each for (each,) in gather_numbers([own or 0.0]))
