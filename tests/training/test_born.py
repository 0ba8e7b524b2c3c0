"""``accelerate`` of models without memory, and of stored weights: what it takes, refuses and says."""

from __future__ import annotations

import contextlib
import io
import itertools

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.runtime import rank
from tests import tiny
from tests.methods.split_runs import whole_weights

MESH = ("parallel_mode", {"tensor": 2})


def accelerate(model, strategy=(), **changes):
    arguments = {
        "optim_func": torch.optim.AdamW, "dataset": tiny.Tokens(), "loss_func": tiny.loss_func,
        "strategy": None if strategy is None else list(strategy), "optim_args": {"lr": 1e-2},
        "dataloader_args": {"batch_size": 8},
    }  # fmt: skip
    return mw.accelerate(model, **arguments | changes)


def on_meta(build=tiny.plain):
    with torch.device("meta"):
        return build()


def trained(result, steps=10):
    losses = [result.step(batch).loss.item() for batch in itertools.islice(result.dataloader, steps)]
    return losses, whole_weights(result.model)


def check_same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert [name for name in one[1] if not torch.equal(one[1][name], other[1][name])] == []


# --- What cannot be born


class NeedsValues(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.size = self.weight.sum().item()


class Raw(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.empty(3))


def fails():
    raise RuntimeError("the disk is on fire")


def half_on_meta():
    model = tiny.plain()
    next(model.children()).to("meta")
    return model


def bad_models():
    cases = [
        (lambda: None, "returns no module.*NoneType.*return the model from it"),
        (fails, "RuntimeError: the disk is on fire.*or pass the built model"),
        (NeedsValues, "cannot be built without memory.*device='cpu'"),
        (half_on_meta(), "half on meta.*function that builds it"),
        (on_meta(Raw), r"scale.*function that builds.*weights=FOLDER.*reset_parameters"),
        (Raw, r"scale.*function that builds.*weights=FOLDER.*reset_parameters"),
        (on_meta(lambda: nn.LazyLinear(2)), "no parameters yet"),
    ]
    texts = []
    for model, pattern in cases:
        with pytest.raises(mw.ModelError, match=pattern) as caught:
            accelerate(model)
        texts.append(str(caught.value))
    model = on_meta()
    for again in (False, True):
        with pytest.raises(mw.ModelError, match="accelerated before") if again else contextlib.nullcontext():
            accelerate(model)
    return texts


def test_what_cannot_be_born_is_told_on_every_rank(ranks):
    texts, others = ranks(2).run(bad_models)
    assert texts == others


def fails_on_one():
    with pytest.raises(mw.ModelError, match="disk is on fire"):
        accelerate(fails if rank() else tiny.plain)
    return True


def test_a_build_that_fails_on_one_rank_fails_on_all(ranks):
    assert all(ranks(2).run(fails_on_one))


# --- Seeds, trials, dry runs


def with_seeds():
    torch.manual_seed(3)
    expected = tiny.plain().state_dict()
    torch.manual_seed(3 + rank())
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        found = whole_weights(accelerate(tiny.plain, ["fsdp"]).model)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    return stream.getvalue()


def test_ranks_with_other_seeds_are_given_rank_0s(ranks):
    told, _ = ranks(2).run(with_seeds)
    assert "the ranks' random generators differ: the model is initialised with rank 0's" in told


def tried(how, folder):
    torch.manual_seed(3)
    model = {"built": tiny.hf_llama, "function": lambda: tiny.hf_llama, "meta": lambda: on_meta(tiny.hf_llama)}[how]()
    weights = None if how == "built" else folder
    if how == "built" and folder is not None:
        model = type(model).from_pretrained(folder)
    result = accelerate(
        model, None, time_limit=60.0, memory_limit="100 MiB", excluded=["checkpoint"], weights=weights,
        prepare_input=lambda ids, device: {"input_ids": ids}, model_input_format="unpack_dict",
        loss_func=lambda inputs, output: output.logits.square().mean(),
    )  # fmt: skip
    return {name.removeprefix("module."): value for name, value in whole_weights(result.model).items()}


@pytest.mark.parametrize("stored", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["function", pytest.param("meta", marks=pytest.mark.long)])
def test_trials_leave_a_model_to_be_born(how, stored, ranks, tmp_path):
    folder = None
    if stored:
        folder = str(tmp_path)
        tiny.hf_llama().save_pretrained(folder)
    ordinary = ranks(2).run(tried, "built", folder)
    for wanted, found in zip(ordinary, ranks(2).run(tried, how, folder), strict=True):
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def dry(strategy):
    torch.manual_seed(3)
    expected = tiny.plain().state_dict()
    torch.manual_seed(3)
    found = whole_weights(accelerate(tiny.plain, strategy, dry_run=True).model)
    assert all(torch.equal(found[name], expected[name.removeprefix("module.")]) for name in found)
    return True


@pytest.mark.parametrize("strategy", [[], ["fsdp"], [MESH, "tensor_parallel"]], ids=str)
def test_a_dry_run_changes_nothing(strategy, ranks):
    assert all(ranks(2).run(dry, strategy))


# --- Stored weights beside a model with values


def beside(strategy, folder):
    runs = []
    for weights in (None, folder):
        torch.manual_seed(1 if weights is None else 2 + rank())
        model = tiny.hf_llama()
        if weights is None:
            model = type(model).from_pretrained(folder)
        prepare = {"prepare_input": lambda ids, device: {"input_ids": ids}, "model_input_format": "unpack_dict"}
        loss = {"loss_func": lambda inputs, output: output.logits.square().mean()}
        runs.append(trained(accelerate(model, strategy, weights=weights, **prepare, **loss)))
    check_same(*runs)
    return True


@pytest.mark.parametrize(
    "strategy",
    [[MESH, "tensor_parallel"], ["fsdp", ("half", "bf16")], [("parallel_mode", {"pipeline": 2}), "pipeline_parallel"],
     *(pytest.param(each, marks=pytest.mark.long) for each in ([], ["zero2"], ["fsdp"], [("half", "bf16")]))],
    ids=str,
)  # fmt: skip
def test_stored_weights_fill_a_model_with_values(strategy, ranks, tmp_path):
    tiny.hf_llama().save_pretrained(tmp_path, max_shard_size="10KB")
    assert all(ranks(2).run(beside, strategy, str(tmp_path)))


# --- Optimizers


def with_built(kind, strategy):
    options = {"lr": 1e-2} | ({"momentum": 0.9} if kind == "SGD" else {})
    runs = []
    for meta in (False, True):
        torch.manual_seed(4)
        model = on_meta() if meta else tiny.plain()
        if meta:
            torch.manual_seed(4)
            plain = tiny.plain()

            def init_weights(model=model, plain=plain):
                for own, value in zip(model.parameters(), plain.parameters(), strict=True):
                    with torch.no_grad():
                        own.copy_(value.detach())

            model.init_weights = init_weights
        names = dict(model.named_parameters())
        first = [names.pop(next(iter(names)))]
        groups = [{"params": first, "lr": 1e-3}, {"params": list(names.values())}]
        optim = getattr(torch.optim, kind)(groups, **options)
        result = accelerate(model, strategy, optim_func=optim, optim_args=None)
        assert result.optim is optim
        runs.append(trained(result))
    check_same(*runs)
    return True


@pytest.mark.parametrize(
    "strategy", [[], pytest.param(["zero2"], marks=pytest.mark.long), ["fsdp"], [MESH, "tensor_parallel"]], ids=str
)
@pytest.mark.parametrize("kind", ["AdamW", pytest.param("SGD", marks=pytest.mark.long)])
def test_an_optimizer_built_over_a_model_on_meta(kind, strategy, ranks):
    assert all(ranks(2).run(with_built, kind, strategy))


def with_adagrad():
    model = on_meta()
    with pytest.raises(mw.ConfigError, match=r"Adagrad has made its states on meta.*optim_func=Adagrad"):
        accelerate(model, ["fsdp"], optim_func=torch.optim.Adagrad(model.parameters(), lr=1e-2), optim_args=None)
    torch.manual_seed(2)
    plain = trained(accelerate(tiny.plain(), ["fsdp"], optim_func=torch.optim.Adagrad))
    torch.manual_seed(2)
    check_same(plain, trained(accelerate(tiny.plain, ["fsdp"], optim_func=torch.optim.Adagrad)))
    return True


def test_states_without_values_are_refused(ranks):
    assert all(ranks(2).run(with_adagrad))


# --- Numbers of the code, and peft


class Scaled(nn.Module):
    """A parameter made of a number, as CLIP's, and a table of NumPy's, as in sinusoidal embeddings."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.inner = tiny.plain()
        self.table = nn.Parameter(torch.linspace(0, 1, 6, device="cpu").reshape(2, 3))
        with torch.no_grad():
            self.table[0].mul_(2)

    def forward(self, ids):
        return self.inner(ids) * self.scale + self.table.sum()


def of_numbers(strategy):
    runs = []
    for build in (False, True):
        torch.manual_seed(5)
        runs.append(trained(accelerate(Scaled if build else Scaled(), strategy)))
    check_same(*runs)
    return True


@pytest.mark.parametrize("strategy", [[], ["fsdp"]], ids=str)
def test_parameters_made_of_numbers(strategy, ranks):
    assert all(ranks(2).run(of_numbers, strategy))


def reads_itself(folder):
    from transformers import LlamaForCausalLM

    options = {"prepare_input": lambda ids, device: {"input_ids": ids}, "model_input_format": "unpack_dict"}
    options["loss_func"] = lambda inputs, output: output.logits.square().mean()
    runs = []
    for model in (LlamaForCausalLM.from_pretrained(folder), lambda: LlamaForCausalLM.from_pretrained(folder)):
        runs.append(trained(accelerate(model, ["fsdp"], **options)))
    check_same(*runs)
    return True


def test_a_function_that_reads_weights_itself(ranks, tmp_path):
    tiny.hf_llama().save_pretrained(tmp_path, max_shard_size="10KB")
    assert all(ranks(2).run(reads_itself, str(tmp_path)))


def adapted(base=None, **changes):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    model = tiny.hf_llama() if base is None else LlamaForCausalLM.from_pretrained(base)
    torch.manual_seed(6)  # of the adapters
    options = {"target_modules": ["q_proj", "up_proj"], "r": 2}
    return get_peft_model(model, LoraConfig(**options | changes))


def with_adapters(strategy, folder):
    options = {"prepare_input": lambda ids, device: {"input_ids": ids}, "model_input_format": "unpack_dict"}
    options["loss_func"] = lambda inputs, output: output.logits.square().mean()
    copied = {} if MESH in strategy else {"modules_to_save": ["lm_head"]}
    ordinary = trained(accelerate(adapted(folder, **copied), strategy, **options))
    check_same(ordinary, trained(accelerate(lambda: adapted(**copied), strategy, weights=folder, **options)))
    if MESH not in strategy:  # DoRA's magnitudes are those of the stored base
        ordinary = trained(accelerate(adapted(folder, use_dora=True), strategy, **options))
        check_same(ordinary, trained(accelerate(lambda: adapted(use_dora=True), strategy, weights=folder, **options)))
    with pytest.raises(mw.ModelError, match=r"computed from others, which the weights replace.*lora_A"):
        accelerate(lambda: adapted(init_lora_weights="olora"), strategy, weights=folder, **options)
    return True


@pytest.mark.parametrize(
    "strategy",
    [["fsdp"], *(pytest.param(each, marks=pytest.mark.long) for each in ([], ["zero2"], [MESH, "tensor_parallel"]))],
    ids=str,
)
def test_adapters_of_peft_over_stored_weights(strategy, ranks, tmp_path):
    pytest.importorskip("peft")
    tiny.hf_llama().save_pretrained(tmp_path, max_shard_size="10KB")
    assert all(ranks(2).run(with_adapters, strategy, str(tmp_path)))
