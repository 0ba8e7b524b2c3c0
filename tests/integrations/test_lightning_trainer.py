"""Lightning's Trainer on a strategy, beside the same Trainer on one process."""

import os

import pytest
import torch

pytest.importorskip("lightning")

import lightning as L
from torch.utils.data import DataLoader, DistributedSampler

from meshwright.errors import MeshwrightError
from tests import tiny


class Module(L.LightningModule):
    def __init__(self, seen, automatic=True):
        super().__init__()
        self.model, self.seen = tiny.build("plain"), seen
        self.automatic_optimization = automatic

    def forward(self, tokens):
        return self.model(tokens)

    def training_step(self, batch, number):
        loss = tiny.loss_func(batch, self(batch))  # calls the module's own forward
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        self.log("valid", tiny.loss_func(batch, self.model(batch)), sync_dist=True)

    def on_train_epoch_end(self):
        self.seen.append(
            ("train", self.trainer.callback_metrics["train"].item(), self.lr_schedulers().get_last_lr()[0])
        )

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.seen.append(("valid", self.trainer.callback_metrics["valid"].item()))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(strategy, folder, replicas=1, epochs=3, resume=None, accumulate=2, module=None, callbacks=(), **options):
    """37 samples, by 4: the last batch is ragged, and divides among no number of replicas."""
    seen = []
    module = module or Module(seen)
    module.seen = seen
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(folder, monitor="valid", save_top_k=1, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=epochs, accumulate_grad_batches=accumulate,
        callbacks=[checkpoint, *callbacks], logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **{"devices": 1, "gradient_clip_val": 0.5} | options,
    )  # fmt: skip
    # Lightning shuffles what it divides among ranks: in this order.
    data = tiny.Tokens(37)
    order = DistributedSampler(data, 1, 0) if strategy == "auto" else None
    trainer.fit(
        module,
        DataLoader(data, batch_size=4 // replicas, sampler=order),
        DataLoader(tiny.Tokens(21), batch_size=4 // replicas),
        ckpt_path=resume,
    )
    curve = list(seen)
    loader = DataLoader(tiny.Tokens(21), batch_size=4 // replicas)
    best = trainer.validate(module, loader, ckpt_path="best", verbose=False)
    return curve, best[0]["valid"], checkpoint.last_model_path


def ours(strategy, world, folder, replicas=1, **options):
    return refusal_or(lambda: fit(strategy_of(strategy), folder, replicas, devices=world, **options))


def strategy_of(strategy):
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from meshwright.integrations.lightning import TrainerStrategy

    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
    sample = torch.zeros(2, tiny.SEQ_LEN, dtype=torch.long)
    return TrainerStrategy(strategy, sample_batch=sample, cluster_environment=TorchElasticEnvironment())


def refusal_or(run):
    try:
        return run()
    except MeshwrightError as error:
        return str(error)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return fit("auto", tmp_path_factory.mktemp("theirs"))


CASES = [(2, 2, ["fsdp"])]
LONG = [
    (1, 1, []),
    (2, 2, []),
    (2, 2, ["zero1"]),
    (4, 4, ["zero2"]),
    (4, 4, ["fsdp"]),
    (2, 1, ["tensor_parallel", ("parallel_mode", {"tensor": 2})]),
    (4, 2, ["fsdp", "tensor_parallel", ("parallel_mode", {"zero": 2, "tensor": 2})]),
]


def compare(found, expected):
    assert not isinstance(found, str), found
    assert len(found[0]) == len(expected[0])
    for one, other in zip(found[0], expected[0], strict=True):
        assert one[0] == other[0]
        assert one[1:] == pytest.approx(other[1:], rel=1e-4), (found, expected)
    assert found[1] == pytest.approx(expected[1], rel=1e-4)


@pytest.mark.parametrize(("world", "replicas", "strategy"), CASES, ids=str)
def test_the_trainer_trains_as_on_one_process_and_resumes_on_other_ranks(
    ranks, theirs, tmp_path, world, replicas, strategy
):
    for each in ranks(world).run(ours, strategy, world, tmp_path, replicas, epochs=2):
        assert not isinstance(each, str), each
        compare(each, (theirs[0][:4], theirs[0][2][1]))
    resumed = ranks(1).run(ours, ["zero1"], 1, tmp_path / "resumed", resume=each[2])[0]
    compare(resumed, (theirs[0][4:], theirs[1]))


@pytest.mark.long
@pytest.mark.parametrize(("world", "replicas", "strategy"), LONG, ids=str)
def test_the_trainer_under_other_strategies(ranks, theirs, tmp_path, world, replicas, strategy):
    for each in ranks(world).run(ours, strategy, world, tmp_path, replicas):
        compare(each, theirs)


def fit_twice(folder):
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy_of([]), logger=False, max_steps=1,
                        enable_progress_bar=False, enable_checkpointing=False, default_root_dir=folder)  # fmt: skip
    module = Module([])
    for _ in range(2):
        trainer.fit(module, DataLoader(tiny.Tokens(8), batch_size=2))


def refusals(folder, plain):
    """What cannot be honoured, one after another."""

    def refused(strategy=(), **options):
        return ours(list(strategy), 2, folder, 2, **options)

    pipeline = ["pipeline_parallel", ("parallel_mode", {"pipeline": 2})]
    return [
        refused(precision="bf16-mixed"),
        refused(pipeline),
        refused(["sequence_parallel", ("parallel_mode", {"sequence": 2})]),
        refused(module=Module([], automatic=False), gradient_clip_val=None, accumulate=1),
        refused(sync_batchnorm=True),
        refused(callbacks=[L.pytorch.callbacks.StochasticWeightAveraging(1e-2)]),
        refused(resume=plain),
        refusal_or(lambda: fit_twice(folder)),
    ]


def test_what_cannot_be_honoured_is_refused_on_every_rank(ranks, theirs, tmp_path):
    words = [
        "would both cast the model", "A pipeline's stages run inside", "divide the tokens", "manual optimization",
        "sync_batchnorm", "average weights", "no checkpoint of this strategy", "distributed before",
    ]  # fmt: skip
    for found in ranks(2).run(refusals, tmp_path, theirs[2]):
        for each, word in zip(found, words, strict=True):
            assert word in each, (each, word)


def evaluated(folder):
    """``test`` and ``predict`` of a module that is not trained."""
    module = Module([])
    module.test_step = module.validation_step
    module.predict_step = lambda batch: module(batch).argmax(-1)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy_of(["fsdp"]), logger=False,
                        enable_progress_bar=False, default_root_dir=folder)  # fmt: skip
    loader = DataLoader(tiny.Tokens(21), batch_size=2)
    found = trainer.test(module, loader, verbose=False)[0]["valid"]
    whole = torch.cat(trainer.predict(module, DataLoader(tiny.Tokens(20), batch_size=2)))
    return found, whole, refusal_or(lambda: trainer.predict(module, loader))


def test_test_and_predict_of_a_module_that_is_not_trained(ranks, tmp_path):
    model, data = tiny.build("plain"), tiny.Tokens(21)
    whole = model(data.ids)
    (loss, first, refusal), (_, second, _) = ranks(2).run(evaluated, tmp_path)
    assert loss == pytest.approx(tiny.loss_func(data.ids, whole).item(), rel=1e-5)
    assert torch.equal(first, whole.argmax(-1)[:20:2])
    assert torch.equal(second, whole.argmax(-1)[1:20:2])
    assert "equally many" in refusal


class Parametrised(Module):
    def __init__(self, where):
        super().__init__([])
        self.save_hyperparameters()


def loaded_with(where, folder):
    """What loading the best checkpoint tells, of which a hyperparameter is an object; and if its class is allowed."""
    options = {"devices": 1, "epochs": 1}
    told = refusal_or(lambda: fit(strategy_of([]), folder / "a", module=Parametrised(where), **options))
    with torch.serialization.safe_globals([type(where)]):
        _, loss, _ = fit(strategy_of([]), folder / "b", module=Parametrised(where), **options)
    return told, loss


def test_a_hyperparameter_that_is_an_object_is_named_with_the_safe_way_to_load_it(ranks, tmp_path):
    ((told, loss),) = ranks(1).run(loaded_with, tmp_path / "data", tmp_path)
    assert "holds objects that are not loaded" in told
    assert "Got pathlib.PosixPath." in told
    assert "add_safe_globals" in told
    assert loss > 0
