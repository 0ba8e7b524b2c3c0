"""Lightning Fabric on a strategy: its own example's loop, beside one process without Lightning's strategies."""

import os

import pytest
import torch

pytest.importorskip("lightning")

from torch.utils.data import DataLoader

from meshwright.errors import MeshwrightError
from tests import tiny


def fabric_loop(strategy, folder=None, epochs=2, resume=None, **options):
    """Fabric's example: accumulation, clipping, a schedule, a checkpoint after the first epoch."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=options.pop("devices", 1), num_nodes=1, strategy=strategy, **options)
    if isinstance(strategy, str):
        replicas = 1
    else:
        fabric.launch()
    model = tiny.build("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 10)
    model, optimizer = fabric.setup(model, optimizer)
    if not isinstance(strategy, str):
        replicas = fabric.strategy.job_of(model).num_replicas
    loader = fabric.setup_dataloaders(DataLoader(tiny.Tokens(40), batch_size=4 // replicas))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    if resume is not None:
        fabric.load(resume, state)
    seen = []
    for epoch in range(state["epoch"], epochs):
        for number, batch in enumerate(loader):
            last = number % 2 == 1
            with fabric.no_backward_sync(model, enabled=not last):
                loss = tiny.loss_func(batch, model(batch)) / 2
                fabric.backward(loss, model=model) if not isinstance(strategy, str) else fabric.backward(loss)
            mean = fabric.all_reduce(loss.detach(), reduce_op="mean").item()
            if last:
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5).item()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                seen.append((epoch, mean, norm))
        state["epoch"] = epoch + 1
        if folder is not None and epoch == 0:
            fabric.save(folder, state)
    return seen


def ours(strategy, world, **options):
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from meshwright.integrations.lightning import FabricStrategy

    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
    own = FabricStrategy(strategy, sample_batch=torch.zeros(2, tiny.SEQ_LEN, dtype=torch.long),
                         cluster_environment=TorchElasticEnvironment())  # fmt: skip
    try:
        return fabric_loop(own, devices=world, **options)
    except MeshwrightError as error:
        return str(error)


@pytest.fixture(scope="module")
def theirs():
    return fabric_loop("auto")


CASES = [(2, ["fsdp"])]
LONG = [
    (2, []),
    (2, ["zero2"]),
    (2, ["tensor_parallel", ("parallel_mode", {"tensor": 2})]),
    (4, ["fsdp", "tensor_parallel", ("parallel_mode", {"zero": 2, "tensor": 2})]),
]


def compare(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4), (one, other)


@pytest.mark.parametrize(("world", "strategy"), CASES, ids=str)
def test_fabric_trains_as_on_one_process_and_resumes_on_other_ranks(ranks, theirs, tmp_path, world, strategy):
    for each in ranks(world).run(ours, strategy, world, folder=tmp_path / "saved"):
        compare(each, theirs)
    resumed = ranks(1).run(ours, ["zero1"], 1, resume=tmp_path / "saved")[0]
    compare(resumed, [entry for entry in theirs if entry[0] == 1])


@pytest.mark.long
@pytest.mark.parametrize(("world", "strategy"), LONG, ids=str)
def test_fabric_under_other_strategies(ranks, theirs, world, strategy):
    for each in ranks(world).run(ours, strategy, world):
        compare(each, theirs)


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        (["fsdp"], {"precision": "bf16-mixed"}, "would both cast the model"),
        (["pipeline_parallel", ("parallel_mode", {"pipeline": 2})], {}, "A pipeline's stages run inside"),
    ],
)
def test_what_cannot_be_honoured_is_refused_on_every_rank(ranks, strategy, options, words):
    assert all(words in each for each in ranks(2).run(ours, strategy, 2, **options))


def accuracy_of(size):
    """torchmetrics beside ``job.evaluate``: 37 samples, which divide among no number of ranks here."""
    import torchmetrics

    import meshwright as mw
    from meshwright.data import global_batch_loader

    job = mw.accelerate(tiny.build("plain"), loss_func=tiny.loss_func, strategy=["fsdp"] if size > 1 else [])
    metric = torchmetrics.Accuracy("multiclass", num_classes=tiny.VOCAB, sync_on_compute=False)
    loader = global_batch_loader(
        tiny.Tokens(37),
        loader_args={"batch_size": 8, "shuffle": False},
        replica=job.replica,
        num_replicas=job.num_replicas,
    )
    for batch in loader:
        with torch.no_grad():
            guesses = job.model(batch)[:, :-1].argmax(-1)
        guesses, targets = job.gather_for_metrics((guesses, batch[:, 1:]))
        metric.update(guesses.flatten(), targets.flatten())
    return metric.compute().item(), metric.tp.sum().item() + metric.fn.sum().item()


def test_torchmetrics_count_every_sample_once(ranks):
    pytest.importorskip("torchmetrics")
    alone = ranks(1).run(accuracy_of, 1)[0]
    assert alone[1] == 37 * (tiny.SEQ_LEN - 1)
    assert all(each == alone for each in ranks(2).run(accuracy_of, 2))


def saved_without_models(folder):
    """What a state without models comes back as; and what a folder that is none is refused with."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from meshwright.integrations.lightning import FabricStrategy

    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
    strategy = FabricStrategy(["fsdp"], cluster_environment=TorchElasticEnvironment())
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.save(folder / "new" / "saved", {"epoch": 3, "curve": [0.5]})
    state = {"epoch": 0}
    rest = fabric.load(folder / "new" / "saved", state)
    try:
        fabric.load(folder, state)
    except MeshwrightError as error:
        return state, rest, str(error)


def test_a_state_without_models_is_saved_and_a_folder_that_is_none_is_told(ranks, tmp_path):
    for state, rest, told in ranks(2).run(saved_without_models, tmp_path):
        assert (state, rest) == ({"epoch": 3}, {"curve": [0.5]})
        assert "is no checkpoint of this strategy" in told
