"""Saved and loaded part by part: the run goes on as if it had not stopped, also under another plugin."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import meshwright as mw
from meshwright.compat.colossalai import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from tests import tiny
from tests.compat.colossalai import helpers

STOP = 3


def save(job, folder, shard, use_async=False):
    booster, model, optim, _, _, schedule = job
    booster.save_model(model, folder / "model", shard, size_per_shard=1, use_async=use_async)
    booster.save_optimizer(optim, folder / "optim", shard, prefix="mine" if shard else None, use_async=use_async)
    booster.save_lr_scheduler(schedule, folder / "schedule")


def load(job, folder, shard):
    booster, model, optim, _, _, schedule = job
    booster.load_optimizer(optim, folder / "optim", prefix="mine" if shard else None)
    booster.load_model(model, folder / "model")
    booster.load_lr_scheduler(schedule, folder / "schedule")


def go_on(before, after, optimizer, shard, folder):
    """Losses of the steps behind the stop: of the run that goes on, and of the one that loads."""
    job = helpers.boosted(before, optimizer)
    helpers.train(*job, steps=STOP)
    save(job, folder, shard, use_async=shard)
    on = helpers.train(*job, start=STOP, steps=STOP)
    other = helpers.boosted(after, optimizer, seed=99)
    load(other, folder, shard)
    return on, helpers.train(*other, start=STOP, steps=STOP)


def resumed(folder):
    hybrid = HybridParallelPlugin(tp_size=1, pp_size=1, precision="bf16")
    llz = LowLevelZeroPlugin(stage=2, precision="bf16")
    fp32 = HybridParallelPlugin(tp_size=1, pp_size=1, precision="fp32", zero_stage=1)
    fp16 = HybridParallelPlugin(tp_size=1, pp_size=1, precision="fp16", initial_scale=64.0)
    host = LowLevelZeroPlugin(stage=1, precision="bf16", cpu_offload=True)
    same = [(hybrid, "sgd", True), (llz, "own", True), (fp32, "adagrad", False), (host, "adamw", True)]
    for number, (plugin, optimizer, shard) in enumerate([*same, (fp16, "adamw", False)]):
        on, loaded = go_on(plugin, plugin, optimizer, shard, folder / f"same{number}")
        assert on == loaded, plugin
    on, loaded = go_on(TorchDDPPlugin(), GeminiPlugin(precision="fp32"), "own", True, folder / "other")
    assert on == pytest.approx(loaded, rel=1e-5)
    on, loaded = go_on(hybrid, GeminiPlugin(precision="fp32"), "adamw", True, folder / "exact")
    assert on == pytest.approx(loaded, rel=3e-2)  # the fp32 masters of a bf16 run become the weights of an fp32 run
    return True


def test_a_run_goes_on(ranks, tmp_path):
    assert all(ranks(2).run(resumed, tmp_path))


def what_is_in_the_files(folder):
    plugin = LowLevelZeroPlugin(stage=2, precision="fp32")
    job = helpers.boosted(plugin)
    helpers.train(*job, steps=2)
    booster, model, optim, *_ = job
    wanted = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    save(job, folder / "file", shard=False)
    booster.save_model(model, folder / "all.safetensors", use_safetensors=True)
    both = folder / "both"
    booster.save_model(model, both, shard=True)
    booster.save_optimizer(optim, both, shard=True)
    mw.wait_for_saves()
    mw.synchronize()
    for found in (torch.load(folder / "file" / "model", weights_only=True), load_file(folder / "all.safetensors")):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    index = json.loads((both / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    assert set(index["weight_map"].values()) == {"model-00001-of-00001.safetensors"}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    states = torch.load(folder / "file" / "optim", weights_only=True)
    assert states["state"].keys() == wanted.keys()
    assert states["state"]["first.weight"]["exp_avg"].shape == (13, 7)
    assert [group["lr"] for group in states["param_groups"]] == [1e-2, 0.03]
    loaded = helpers.boosted(plugin, seed=8)
    loaded[0].load_model(loaded[1], both)
    loaded[0].load_optimizer(loaded[2], both)
    assert helpers.train(*loaded, steps=1) == helpers.train(*job, steps=1)
    return True


def test_the_files_are_those_of_plain_torch_and_transformers(ranks, tmp_path):
    assert all(ranks(2).run(what_is_in_the_files, tmp_path))


def refusals(folder):
    booster, model, optim, _, _, schedule = helpers.boosted(TorchDDPPlugin())
    booster.save_optimizer(optim, folder / "optim", shard=True)
    booster.save_lr_scheduler(schedule, folder / "schedule")
    before = helpers.whole(model)
    _, _, sgd, _, _, _ = helpers.boosted(TorchDDPPlugin(), "sgd")
    constant = torch.optim.lr_scheduler.ConstantLR(optim)
    (folder / "none").mkdir(exist_ok=True)
    torch.save(model, folder / "pickle.pt")
    for name, text in (("broken", "{"), ("outside", '{"weight_map": {"x": "../x.safetensors"}}')):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "model.safetensors.index.json").write_text(text)
    cases = [
        (lambda: booster.load_optimizer(sgd, folder / "optim"), "another optimizer"),
        (lambda: booster.load_lr_scheduler(constant, folder / "schedule"), "another learning-rate scheduler"),
        (lambda: booster.load_lr_scheduler(schedule, folder / "pickle.pt"), "no learning-rate scheduler"),
        (lambda: booster.load_optimizer(optim, folder / "nowhere"), "cannot be read"),
        (lambda: booster.load_model(model, folder / "none"), "no weights"),
        (lambda: booster.load_model(model, folder / "broken"), "cannot be used"),
        (lambda: booster.load_model(model, folder / "outside"), "no files beside it"),
        (lambda: booster.load_model(model, folder / "pickle.pt"), "could run code"),
        (lambda: booster.save_model(model, folder / "x", gather_dtensor=False), "gather_dtensor"),
        (lambda: booster.save_model(model, folder / "x.pt", use_safetensors=True), "ends in .safetensors"),
        (lambda: booster.save_model(model, folder / "x", shard=True, size_per_shard=0), "size_per_shard"),
        (lambda: booster.save_optimizer(optim.unwrap(), folder / "x"), "not boosted"),
        (lambda: booster.save_optimizer(optim, folder / "x.safetensors", use_async=True), "does not fit into one"),
    ]
    for call, text in cases:
        with pytest.raises(mw.MeshwrightError, match=text):
            call()
    assert torch.equal(helpers.whole(model), before)
    return True


def test_what_cannot_be_saved_or_loaded_is_refused(ranks, tmp_path):
    (only,) = ranks(1).run(refusals, tmp_path)
    assert only


def lora(folder):
    from peft import LoraConfig

    booster = mw.booster.Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=1, precision="fp32", zero_stage=3))
    base = tiny.build("gpt2")
    model = booster.enable_lora(base, lora_config=LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0))
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    frozen = base.transformer.wte.weight.detach().clone()
    model, optim, *_ = booster.boost(model, optim)
    ids = torch.arange(mw.rank(), mw.rank() + 24).reshape(2, 12)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        booster.backward(loss, optim)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    booster.save_lora_as_pretrained(model, folder / "adapters")
    names = set(load_file(folder / "adapters" / "adapter_model.safetensors"))
    assert all("lora_" in name for name in names)
    plain = booster.enable_lora(tiny.build("gpt2"), pretrained_dir=folder / "adapters")
    assert torch.equal(plain.base_model.model.transformer.wte.weight, frozen)
    torch.testing.assert_close(plain.eval()(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(mw.ModelError, match="before boost"):
        booster.enable_lora(model)
    with pytest.raises(mw.ConfigError, match="which adapters"):
        booster.enable_lora(plain)
    with pytest.raises(mw.ConfigError, match="quantise"):
        booster.enable_lora(plain, quantize=True)
    with pytest.raises(mw.ModelError, match="no LoRA adapters"):
        booster.save_lora_as_pretrained(nn.Linear(2, 2), folder / "none")
    return True


@pytest.mark.long
def test_adapters_train_and_are_saved_by_themselves(ranks, tmp_path):
    assert all(ranks(2).run(lora, Path(tmp_path)))
