"""Stages of a pipeline through the booster: trained, saved and loaded as in one process."""

import contextlib
import io
import itertools

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.compat.colossalai import Booster, HybridParallelPlugin
from tests import tiny
from tests.methods.pipeline_runs import Poison, build
from tests.methods.split_runs import whole_weights
from tests.methods.test_parity import check_weights

STEPS, BATCH = 10, 8
ONE_FILE = "model-00001-of-00001.safetensors"


class Labelled(tiny.Tokens):
    """Samples as transformers' models take them."""

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def criterion(output, inputs):
    return tiny.loss_func(inputs, output)


def reference(name, clip, steps=STEPS):
    """Losses, norms, first and last weights of one process."""
    model = build(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optim, losses, norms = sgd(model), [], []
    for batch in itertools.islice(DataLoader(Labelled(), batch_size=BATCH), steps):
        optim.zero_grad()
        loss = criterion(model(**batch), batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optim.step()
        losses.append(loss.item())
    return losses, norms, before, {key: value.detach() for key, value in model.named_parameters()}


def boosted(name, loss=criterion, **options):
    booster = Booster(plugin=HybridParallelPlugin(**{"precision": "fp32", "num_microbatches": 4, **options}))
    plain = build(name)
    optim = sgd(plain)
    loader = booster.plugin.prepare_dataloader(Labelled(), BATCH)
    model, boosted_optim, *rest = booster.boost(plain, optim, loss, loader)
    assert boosted_optim.unwrap() is optim
    assert rest[1:] == [loader, None]
    booster.own_criterion = rest[0]
    return booster, model, boosted_optim, loader


def other_weights_on_each_rank():
    """Scripts seed once: what is built after training has other weights on each rank."""
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, precision="fp32", num_microbatches=4, max_norm=1e6))
    plain = build("gpt2")
    if mw.rank() > 0:
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(1.0 + mw.rank())
    loader = booster.plugin.prepare_dataloader(Labelled(), BATCH)
    with contextlib.redirect_stderr(io.StringIO()) as told:
        model, optim, *_ = booster.boost(plain, sgd(plain), criterion, loader)
    batches = iter(loader)
    return [step(booster, model, optim, batches)[0] for _ in range(STEPS)], told.getvalue()


def test_stages_take_the_weights_of_rank_0(ranks):
    expected, *_ = reference("gpt2", 1e6)
    answers = ranks(2).run(other_weights_on_each_rank)
    for losses, _ in answers:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert "weights differ between ranks" in answers[0][1]


def criterion_of_another_model():
    """Losses of a model whose criterion was boosted with another before, by the schedule and by a plain loop; and of
    that other model with the same criterion, by the schedule alone, before and behind a refused loss."""
    first, other, other_optim, _ = boosted("tied", pp_size=2, max_norm=1e6)
    second, model, optim, loader = boosted("tied", pp_size=2, max_norm=1e6, loss=first.own_criterion)
    losses, others = [], []
    for index, batch in enumerate(itertools.islice(loader, STEPS)):
        others.append(step(first, other, other_optim, iter([batch]), second.own_criterion)[0])
        if index % 3:
            losses.append(second.execute_pipeline(iter([batch]), model, second.own_criterion, optim)["loss"].item())
        else:
            with pytest.raises(mw.ModelError, match="loss is of another model's output"):
                second.own_criterion(other(**batch), batch)
            loss = second.own_criterion(model(**batch), batch)
            second.backward(loss, optim)
            losses.append(loss.item())
        optim.step()
        optim.zero_grad()
    return losses, others


def test_a_criterion_serves_a_second_pipeline(ranks):
    expected, *_ = reference("tied", 1e6)
    for results in ranks(2).run(criterion_of_another_model):
        for losses in results:
            assert losses == pytest.approx(expected, rel=1e-4)


def step(booster, model, optim, batches, criterion=criterion):
    result = booster.execute_pipeline(batches, model, criterion, optim)
    assert result["outputs"] is None
    optim.step()
    optim.zero_grad()
    return result["loss"].item(), optim.get_grad_norm()


def train(name, clip, steps=STEPS, folder=None, **options):
    """Losses, norms and this rank's weights; saved in the end."""
    booster, model, optim, loader = boosted(name, max_norm=clip, **options)
    batches = iter(loader)
    told = [step(booster, model, optim, batches) for _ in range(steps)]
    if folder is not None:
        for shard in (False, True):
            booster.save_model(model, folder / f"model{shard}", shard, size_per_shard=1)
            booster.save_optimizer(optim, folder / f"optim{shard}", shard)
        booster.save_model(model, folder / "model.safetensors", use_safetensors=True)
    return [loss for loss, _ in told], [norm for _, norm in told], whole_weights(model)


def go_on(name, clip, folder, shard, **options):
    """The same from what was saved: the losses of two more steps, and weights."""
    booster, model, optim, loader = boosted(name, max_norm=clip, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    booster.load_model(model, folder / f"model{shard}")
    booster.load_optimizer(optim, folder / f"optim{shard}")
    batches = iter(loader)
    told = [step(booster, model, optim, batches) for _ in range(2)]
    return [loss for loss, _ in told], [norm for _, norm in told], whole_weights(model)


def together(results):
    """The weights of all ranks, each name alike wherever it is."""
    every = {}
    for _, _, own in results:
        for name, value in own.items():
            assert name not in every or torch.equal(every[name], value), name
        every |= own
    return every


def check(results, expected):
    losses, norms, before, after = expected
    for own_losses, own_norms, _ in results:
        assert own_losses == pytest.approx(losses, rel=1e-4)
        assert own_norms == pytest.approx(norms, rel=1e-5)
    weights = together(results)
    assert weights.keys() == after.keys()
    if len(losses) == STEPS:
        check_weights(weights, before, after)
        return
    # In a few steps norms hardly move: rounding is a larger part of that, and only the whole distance is compared.
    moved, apart = (torch.cat([(after[k] - x[k]).flatten() for k in after]).norm() for x in (before, weights))
    assert apart < 1e-5 * moved


def overflowing():
    """fp16: steps skipped when gradients of one stage alone overflow; loss scale and whether weights stayed."""
    options = {"precision": "fp16", "initial_scale": 2.0**8, "hysteresis": 1, "pp_size": 2, "max_norm": 1.0}
    booster, model, optim, loader = boosted("tied", **options)
    batches, told = iter(loader), []
    for index in range(3):
        hook = None
        if index == 1 and mw.rank() == 0:
            weight = next(p for name, p in model.named_parameters() if "layers.0" in name)
            hook = weight.register_hook(Poison())
        before = whole_weights(model)
        booster.execute_pipeline(batches, model, criterion, optim)
        optim.step()
        optim.zero_grad()
        if hook is not None:
            hook.remove()
        kept = all(torch.equal(before[name], now) for name, now in whole_weights(model).items())
        told.append((optim.step_was_skipped, kept, optim.scaler.get_scale()))
    return told


def without_a_step():
    """Outputs and losses of execute_pipeline, with the criterion that boost returned, and of a loop by hand;
    accumulated gradients of tied weights."""
    booster, model, optim, loader = boosted("tied", pp_size=2, zero_stage=3, num_microbatches=None, microbatch_size=2)
    batch = next(iter(loader))
    only = booster.execute_pipeline(iter([batch]), model, booster.own_criterion, None, return_outputs=True)
    with torch.no_grad():
        by_hand = booster.own_criterion(model(**batch), batch)
    grads = []
    for accumulate in (lambda: booster.no_sync(model, optim), contextlib.nullcontext):
        optim.zero_grad()
        with accumulate():
            booster.execute_pipeline(iter([batch]), model, criterion, optim)
        booster.execute_pipeline(iter([batch]), model, booster.own_criterion, optim)
        grads.append({name: full(p.grad) for name, p in model.named_parameters()})
    return only["loss"].item(), only["outputs"], by_hand.item(), grads


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def two_ranks(folder):
    short = ("tied", 0.5, 2)
    return {
        "1f1b": train("tied", 0.5, folder=folder, pp_size=2),
        "zbv": train(*short, pp_size=2, pp_style="zbv"),
        "interleaved": train(*short, pp_size=2, pp_style="interleaved", num_model_chunks=2, zero_stage=1),
        "split": train(*short, pp_size=2, num_layers_per_stage=[3, 1]),
        "overflow": overflowing(),
        "without": without_a_step(),
    }


def check_without(results, model):
    batch = next(iter(DataLoader(Labelled(), batch_size=BATCH)))
    output = model(**batch)
    loss = criterion(output, batch)
    (loss + loss).backward()
    for own_loss, _, by_hand, grads in results:
        assert own_loss == pytest.approx(loss.item(), rel=1e-5)
        assert by_hand == pytest.approx(loss.item(), rel=1e-5)
        for found in grads:
            for name, grad in found.items():
                torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    assert results[0][1] is None
    torch.testing.assert_close(results[1][1].logits, output.logits, rtol=1e-4, atol=1e-5)


def test_two_stages(ranks, tmp_path):
    every = ranks(2).run(two_ranks, tmp_path)
    check([result["1f1b"] for result in every], reference("tied", 0.5))
    short = reference("tied", 0.5, 2)
    for case in ("zbv", "interleaved", "split"):
        check([result[case] for result in every], short)
    assert all(result["overflow"] == [(False, False, 256), (True, True, 128), (False, False, 128)] for result in every)
    check_without([result["without"] for result in every], build("tied"))


def four_ranks(folder):
    trained = train("gpt2", 0.5, folder=folder, tp_size=2, pp_size=2)
    on = go_on("gpt2", 0.5, folder, True, tp_size=2, zero_stage=2, num_microbatches=1)
    again = go_on("gpt2", 0.5, folder, False, pp_size=2, pp_style="zbv", zero_stage=3)
    return trained, on, again


@pytest.mark.long
def test_tensor_shards_of_stages_and_plain_torch(ranks, tmp_path):
    """Fused projections are in the model's own order in every file; they load into plain torch and other layouts."""
    every = ranks(4).run(four_ranks, tmp_path)
    expected = reference("gpt2", 0.5)
    check([result[0] for result in every], expected)
    plain = build("gpt2")
    weights = torch.load(tmp_path / "modelFalse", weights_only=True)
    assert list(weights) == list(plain.state_dict())
    plain.load_state_dict(weights)
    check_weights(dict(plain.named_parameters()), expected[2], expected[3])
    for found in (load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "modelTrue" / ONE_FILE)):
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    optim = torch.load(tmp_path / "optimFalse", weights_only=True)
    names = [name for name, _ in plain.named_parameters()]
    assert [group["params"] for group in optim["param_groups"]] == [names]
    check_buffers(plain, optim["state"])
    for _, (losses, norms, on), (
        other_losses,
        other_norms,
        _,
    ) in every:  # two layouts with the same replicas go on alike
        assert other_losses == pytest.approx(losses, rel=1e-5)
        assert other_norms == pytest.approx(norms, rel=1e-4)
        assert all((on[name] - weights[name]).abs().max() > 0 for name in names)


def check_buffers(plain, states):
    """The saved momenta are those of one process."""
    model = build("gpt2")
    optim = sgd(model)
    for batch in itertools.islice(DataLoader(Labelled(), batch_size=BATCH), STEPS):
        optim.zero_grad()
        criterion(model(**batch), batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
    assert states.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        wanted = optim.state[parameter]["momentum_buffer"]
        torch.testing.assert_close(states[name]["momentum_buffer"], wanted, rtol=1e-3, atol=1e-5)
