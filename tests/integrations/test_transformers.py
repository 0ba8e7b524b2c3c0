"""The Trainer of transformers on a strategy: the losses of the one that it replaces, on one process."""

import json

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from meshwright.errors import CheckpointError
from tests import tiny

NUM_SAMPLES = 37  # of which the last batch of an epoch is ragged, on any number of ranks
ARGUMENTS = {
    "learning_rate": 3e-2, "num_train_epochs": 2, "logging_steps": 1, "eval_strategy": "epoch", "report_to": "none",
    "disable_tqdm": True, "warmup_steps": 2, "max_grad_norm": 0.5, "weight_decay": 0.1, "use_cpu": True,
    "dataloader_pin_memory": False, "save_strategy": "no",
}  # fmt: skip


class Corpus(torch.utils.data.Dataset):
    """Sequences as run_clm.py groups them: labels are the tokens. Some are masked, so that batches differ in weight."""

    def __init__(self, length=NUM_SAMPLES, seed=5, masked=0.2):
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, tiny.VOCAB, (length, 1), generator=generator)
        self.ids = (starts + 5 * torch.arange(tiny.SEQ_LEN)) % tiny.VOCAB
        self.masked = torch.rand(length, tiny.SEQ_LEN, generator=generator) < masked

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "labels": ids.masked_fill(self.masked[index], -100)}


def accuracy(predictions):
    guesses, labels = predictions.predictions[:, :-1].reshape(-1), predictions.label_ids[:, 1:].reshape(-1)
    kept = labels != -100
    return {"accuracy": float((guesses[kept] == labels[kept]).mean()), "count": float(kept.sum())}


def forget_accelerate():
    """Drop what accelerate keeps for the life of a process; a pool's lives on."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


def train(trainer_of, arguments_of, folder, replicas=1, per_step=4, accumulation=2, name="gpt2", **options):
    """The main part of run_clm.py, with either Trainer."""
    forget_accelerate()
    more = options.pop("arguments", {})
    args = arguments_of(
        str(folder), per_device_train_batch_size=per_step // replicas, per_device_eval_batch_size=8 // replicas,
        gradient_accumulation_steps=accumulation, **(ARGUMENTS | more),
    )  # fmt: skip
    resume, masked = options.pop("resume", None), options.pop("masked", 0.2)
    trainer = trainer_of(
        model=tiny.build(name), args=args, train_dataset=Corpus(masked=masked), eval_dataset=Corpus(19, 6, masked),
        compute_metrics=accuracy, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1), **options,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    predicted = trainer.predict(Corpus(11, seed=8))
    history = [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
    return trainer, history, predicted.predictions


def ours(folder, replicas, strategy, per_step=4, **options):
    from meshwright.integrations.transformers import Trainer, TrainingArguments

    return train(Trainer, TrainingArguments, folder, replicas, per_step, strategy=strategy, **options)[1:]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The history of transformers' own Trainer on one process, by the options."""
    import transformers

    known = {}

    def run(**options):
        key = json.dumps(options)
        if key not in known:
            folder = tmp_path_factory.mktemp("theirs")
            known[key] = train(transformers.Trainer, transformers.TrainingArguments, folder, **options)[1:]
        return known[key]

    return run


def compare(found, expected, tolerance=1e-4):
    (history, predictions), (wanted, labels) = found, expected
    assert len(history) == len(wanted) > 10
    for entry, other in zip(history, wanted, strict=True):
        for key in ("loss", "eval_loss", "grad_norm", "learning_rate", "eval_count", "eval_accuracy", "epoch", "step"):
            assert (key in entry) == (key in other)
            assert entry.get(key, 0) == pytest.approx(other.get(key, 0), rel=tolerance, abs=1e-7), (key, entry, other)
    assert (predictions == labels).mean() > 0.98


CASES = [
    (1, 1, ["fsdp"]),
    (2, 2, ["fsdp"]),
]
LONG = [
    (2, 2, []),
    (2, 2, ["zero2"]),
    (2, 1, ["tensor_parallel", ("parallel_mode", {"tensor": 2})]),
    (4, 4, []),
    (4, 4, ["fsdp"]),
    (4, 4, ["zero2"]),
    (4, 2, ["fsdp", "tensor_parallel", ("parallel_mode", {"zero": 2, "tensor": 2})]),
    (2, 1, ["sequence_parallel", ("parallel_mode", {"sequence": 2})]),
    (2, 1, ["context_parallel", ("parallel_mode", {"context": 2})]),
    (2, 2, ["zero1", "checkpoint", "offload"]),
]


@pytest.mark.parametrize(("world", "replicas", "strategy"), CASES)
def test_losses_are_those_of_transformers_on_one_process(ranks, theirs, tmp_path, world, replicas, strategy):
    found = ranks(world).run(ours, tmp_path, replicas, strategy)
    for each in found:
        compare(each, theirs())


@pytest.mark.long
@pytest.mark.parametrize(("world", "replicas", "strategy"), LONG, ids=str)
def test_losses_under_other_strategies(ranks, theirs, tmp_path, world, replicas, strategy):
    for each in ranks(world).run(ours, tmp_path, replicas, strategy):
        compare(each, theirs())


SAVING = {"save_strategy": "steps", "save_steps": 3}


def reloaded(folder):
    """Logits of what transformers itself loads."""
    from transformers import GPT2LMHeadModel

    with torch.no_grad():
        return GPT2LMHeadModel.from_pretrained(folder)(input_ids=Corpus().ids[:4]).logits


def saved_and_live(folder, replicas, strategy):
    """Train, save the model, and return its logits beside those of the saved one."""
    from meshwright.integrations.transformers import Trainer, TrainingArguments

    trainer = train(Trainer, TrainingArguments, folder, replicas, strategy=strategy, arguments=SAVING)[0]
    trainer.save_model(f"{folder}/final")
    with torch.no_grad():
        return trainer.job.model(input_ids=Corpus().ids[:4]).logits


def test_checkpoints_resume_on_other_ranks_and_load_in_transformers(ranks, theirs, tmp_path):
    live = ranks(2).run(saved_and_live, tmp_path, 2, ["fsdp"])[0]
    torch.testing.assert_close(reloaded(tmp_path / "final"), live, atol=1e-5, rtol=1e-5)
    resumed = ranks(1).run(ours, tmp_path, 1, ["zero1"], arguments=SAVING, resume=str(tmp_path / "checkpoint-3"))
    compare(resumed[0], theirs())


def resumed_from(folder):
    try:
        ours(folder / "ours", 1, ["zero1"], arguments=SAVING, resume=str(folder / "theirs" / "checkpoint-3"))
    except CheckpointError as error:
        return str(error)


def test_a_checkpoint_of_transformers_own_trainer_is_told(ranks, tmp_path):
    import transformers

    train(transformers.Trainer, transformers.TrainingArguments, tmp_path / "theirs", arguments=SAVING)
    (told,) = ranks(1).run(resumed_from, tmp_path)
    assert "Got optimizer.pt of another Trainer" in told
    assert "from_pretrained" in told


@pytest.mark.long
def test_the_best_model_is_loaded_at_the_end(ranks, theirs, tmp_path):
    best = {"save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    for each in ranks(2).run(ours, tmp_path, 2, ["fsdp"], arguments=best):
        compare(each, theirs(arguments=best))


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        {"gradient_checkpointing": True},
        {"label_smoothing_factor": 0.1},
        {"average_tokens_across_devices": False},
        {"train_sampling_strategy": "sequential", "lr_scheduler_type": "cosine", "optim": "sgd", "max_steps": 12},
        {"dataloader_drop_last": True, "include_num_input_tokens_seen": "all"},
    ],
    ids=str,
)
def test_arguments_mean_what_they_mean_in_transformers(ranks, theirs, tmp_path, more):
    # Without averaging over ranks, transformers takes means of ranks' means: another mean where labels are masked.
    masked = 0 if more.get("average_tokens_across_devices") is False else 0.2
    expected = theirs(arguments=more, accumulation=1, masked=masked)
    for each in ranks(2).run(ours, tmp_path, 2, ["fsdp"], arguments=more, accumulation=1, masked=masked):
        compare(each, expected)


@pytest.mark.long
def test_half_precision_is_the_strategys(ranks, theirs, tmp_path):
    for each in ranks(2).run(ours, tmp_path, 2, ["fsdp"], arguments={"bf16": True, "learning_rate": 1e-3}):
        for entry, other in zip(each[0], theirs(arguments={"learning_rate": 1e-3})[0], strict=True):
            assert entry.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=0.01)


def refusal(folder, strategy=None, **more):
    forget_accelerate()
    from meshwright.errors import MeshwrightError
    from meshwright.integrations.transformers import Trainer, TrainingArguments

    try:
        args = TrainingArguments(str(folder), report_to="none", **({"use_cpu": True} | more))
        Trainer(tiny.build("gpt2"), args, train_dataset=Corpus(), strategy=strategy).train()
    except MeshwrightError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"fsdp": True}, "cannot take fsdp"),
        ({"auto_find_batch_size": True}, "cannot take auto_find_batch_size"),
        ({"bf16_full_eval": True}, "cannot take bf16_full_eval"),
        ({"strategy": ["pipeline_parallel", ("parallel_mode", {"pipeline": 2})]}, "works inside Accelerated.step"),
    ],
)
def test_what_cannot_be_honoured_is_refused_on_every_rank(ranks, tmp_path, more, words):
    found = ranks(2).run(refusal, tmp_path, **more)
    assert all(words in each for each in found), found


def test_nothing_of_transformers_is_imported_before_it_is_asked_for():
    import subprocess
    import sys

    code = (
        "import sys, meshwright.integrations, meshwright as mw; mw.accelerate; print({*sys.modules} & {'accelerate'})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
