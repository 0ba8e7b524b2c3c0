"""``mw.plan``: ranked plans for models by name, by dimensions, by config and as modules; and what it refuses."""

import dataclasses
import json
from typing import ClassVar

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.cost import find_cluster, make_cluster, memory
from meshwright.planner import ModuleModel, PlanRequest, Workload, choose, fitting
from meshwright.planner.explain import RunLength
from meshwright.planner.plan_request import named_model
from meshwright.planner.search.search_state import Found
from meshwright.runtime import COMMUNICATOR_BYTES
from meshwright.strategy import Strategy
from tests import tiny

SMALL = "gpt:layers=4,hidden=64,heads=4,vocab=256,seq=32"


def test_a_family_is_searched_and_ranked():
    plans = mw.plan(SMALL, "cpu*2", global_batch=8, top=3)
    assert len(plans) == 3
    assert all(isinstance(plan, mw.Plan) and plan.fits for plan in plans)
    rates = [plan.forecast.tokens_per_s for plan in plans]
    assert rates[0] == pytest.approx(max(rates), rel=1e-3)
    line = str(plans[0])
    assert "samples; " in line
    assert "tokens/s; " in line
    assert "\n" not in line
    assert line == plans[0].summary()


def test_a_strategy_given_is_the_only_plan_even_if_it_does_not_fit():
    (plan,) = mw.plan("llama-2-70b", "a100x8", global_batch=8, seq=1024, strategy=["fsdp"], num_micro_batches=1)
    assert not plan.fits
    assert "too much" in str(plan)
    assert plan.forecast.tokens_per_sample == 1024
    assert dict(plan.step.axes)["data"] == 8


def test_a_module_is_traced_once_for_all_clusters():
    cluster = make_cluster("CPU", 2)
    model = tiny.plain(num_layers=2)
    loss = lambda ids, logits: nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())  # noqa: E731
    ids = torch.zeros(2, tiny.SEQ_LEN, dtype=torch.long)
    (plan,) = mw.plan(model, cluster, global_batch=8, sample_batch=ids, loss_func=loss, strategy=["zero2"])
    assert plan.step.activations is not None
    assert plan.forecast.time.step_time_s > 0
    planned = mw.planning.ModuleModel("tiny", model, ids, loss)
    request = PlanRequest(planned, cluster, 8, strategy=["zero2"])
    first, second = request.subject, request.subject_of(make_cluster("CPU", 4), 16)
    first.plan(mw.Strategy(["zero2"]))
    third = request.subject_of(make_cluster("CPU", 4), 16)
    assert second.world == third.world == 4
    assert third.model is first.model
    assert planned.describe()["num_parameters"] == sum(p.numel() for p in model.parameters())


def test_a_plan_leaves_a_model_as_it_is_even_a_module_in_two_places():
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = nn.Sequential(block, block, nn.Linear(8, 1))
    before = {id(module): [*module._parameters.values(), *module._buffers.values()] for module in model.modules()}
    (plan,) = mw.plan(
        model, make_cluster("CPU", 2), global_batch=8, sample_batch=torch.zeros(4, 8), strategy=[],
        loss_func=lambda inputs, output: output.mean(),
    )  # fmt: skip
    assert plan.memory.parameters == sum(p.nbytes for p in model.parameters())
    for module in model.modules():
        now = [*module._parameters.values(), *module._buffers.values()]
        assert all(a is b for a, b in zip(now, before[id(module)], strict=True))


@pytest.mark.parametrize("kind", ["gpt2", "vit", "siglip"])
def test_a_transformers_config_is_built_without_weights(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=128, n_positions=64),
        "vit": lambda: transformers.ViTConfig(**small, image_size=32, patch_size=8),
        "siglip": lambda: transformers.SiglipConfig(
            text_config=small, vision_config={**small, "image_size": 32, "patch_size": 8}
        ),
    }[kind]()
    config.save_pretrained(tmp_path)
    planned = named_model(f"hf:{tmp_path}", 16 if kind == "gpt2" else None)
    assert {parameter.device.type for parameter in planned.module.parameters()} == {"meta"}
    (plan,) = mw.plan(f"hf:{tmp_path}", "cpu*2", global_batch=4, seq=16 if kind == "gpt2" else None, strategy=["fsdp"])
    assert plan.step.activations.saved_bytes > 0
    count = sum(count * parameter.numel for count, parameter in plan.step.every_parameter())
    assert count == planned.describe()["num_parameters"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "lama-3-8b"}, "did you mean 'llama-3-8b'"),
        ({"cluster": "h1000x8"}, "Unknown device 'h1000'"),
        ({"cluster": "h100"}, "names no cluster"),
        ({"global_batch": 0}, "global_batch is not a count"),
        ({"seq": 0}, "seq is not a length"),
        ({"num_micro_batches": 2}, "num_micro_batches without a strategy"),
        ({"strategy": ["fsdp"], "excluded": ["fsdp"]}, "contradict each other"),
        ({"objective": "tokens"}, "Unknown objective 'tokens'"),
        ({"included": ["fsdp"], "excluded": ["fsdp"]}, "fsdp"),
        ({"strategy": ["fsdpp"]}, "did you mean 'fsdp'"),
        ({"sample_batch": torch.zeros(1)}, "has its own samples, loss and optimizer"),
        ({"optim_func": torch.optim.SGD}, "has its own samples, loss and optimizer"),
        ({"model": nn.Linear(2, 2)}, "A module needs a sample"),
        ({"model": "hf:/nowhere"}, "names no transformers config"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(arguments, words):
    with pytest.raises(mw.MeshwrightError) as refused:
        mw.plan(**{"model": SMALL, "cluster": "cpu*2", "global_batch": 8, **arguments})
    assert words in str(refused.value)
    assert "What to do: " in str(refused.value)


def test_a_model_that_cannot_be_traced_is_an_error_that_says_where():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            return y.sum() if y.sum().item() > 0 else y.mean()

    with pytest.raises(mw.ModelError, match="cannot be traced") as refused:
        mw.plan(Looks(), "cpu*2", global_batch=4, sample_batch=torch.zeros(2, 4), strategy=["zero1"])
    assert "item" in str(refused.value)


class NeverRuns(nn.Module):
    """Blocks, and something behind them that cannot be computed."""

    calls: ClassVar[list[int]] = []  # no attribute of one: a trace has its own

    def __init__(self, behind):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
        self.behind = behind

    def forward(self, x):
        NeverRuns.calls.append(len(x))
        for block in self.blocks:
            x = block(x)
        return x.mean() + self.behind(self, x)


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (lambda model, x: model.offset, "no attribute 'offset'"),
        (lambda model, x: torch.unique_consecutive(x).numel(), "unique_consecutive.*depends on values"),
    ],
    ids=["lacks an attribute", "depends on values"],
)
def test_a_model_that_never_runs_is_told_after_a_pass_or_two(behind, words):
    NeverRuns.calls.clear()
    with pytest.raises(mw.ModelError, match=f"cannot be traced.*{words}"):
        mw.plan(NeverRuns(behind), "h100x64", global_batch=128, sample_batch=torch.zeros(2, 4))
    assert 1 <= len(NeverRuns.calls) <= 2


@pytest.mark.parametrize(("factor", "shown"), [(1.2, 2), (2.0, 1)])
def test_plans_in_full_precision_are_shown_where_they_are_near_the_best(factor, shown, monkeypatch):
    cluster = find_cluster("h100x2")
    request = PlanRequest(named_model(SMALL), cluster, 8)
    pipeline = [("parallel_mode", {"pipeline": 2}), "pipeline_parallel"]
    best, other = request.planned([Strategy(["zero1", "amp_native"]), Strategy(pipeline)]).plans
    time = dataclasses.replace(other.forecast.time, step_time_s=best.forecast.time.step_time_s * factor)
    other = dataclasses.replace(other, forecast=dataclasses.replace(other.forecast, time=time))
    # The second search is for plans without amp_native: each is near the best of its own.
    monkeypatch.setattr(PlanRequest, "_search", lambda self, _: Found((other if self.excluded else best,)))
    assert len(request.found().plans) == shown


@pytest.mark.parametrize("top", [1, 2, 4])
def test_the_best_plan_that_does_not_offload_is_shown_however_slow(top, monkeypatch):
    request = PlanRequest(named_model(SMALL), find_cluster("h100x2"), 8, top=top)
    offloads = ["fsdp", "amp_native", ("offload", {"optimizer": 1.0})]
    best, more, other, worse = request.planned(
        [Strategy(each) for each in (offloads, ["zero1", *offloads[1:]], ["zero1"], ["fsdp"])]
    ).plans
    slow = [
        dataclasses.replace(each, forecast=dataclasses.replace(each.forecast, time=time))
        for each, factor in ((other, 3), (worse, 4))
        for time in [dataclasses.replace(each.forecast.time, step_time_s=best.forecast.time.step_time_s * factor)]
    ]
    asked = []

    def search(self, _):
        asked.append(self.excluded)
        return Found(tuple(slow) if self.excluded else (best, more))

    monkeypatch.setattr(PlanRequest, "_search", search)
    monkeypatch.setattr("meshwright.planner.plan_request._is_small", lambda plan: False)
    shown = [plan.strategy for plan in request.found().plans]
    wanted = {1: [best, more], 2: [best, slow[0]], 4: [best, more, slow[0]]}[top]
    assert sorted(map(str, shown)) == sorted(str(plan.strategy) for plan in wanted)
    assert asked == [(), ("offload",)][: min(top, 2)]


class ByName(nn.Module):
    """Takes arguments by name, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, input_ids=None, labels=None):
        logits = self.head(self.table(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_dictionary_for_a_model_that_takes_names_is_told_the_input_format():
    ids = torch.zeros(2, 8, dtype=torch.long)
    asked = {"global_batch": 4, "sample_batch": {"input_ids": ids, "labels": ids}}
    for more in ({}, {"strategy": ["zero1"]}):
        with pytest.raises(mw.ModelError, match=r"must be Tensor, not dict.*'unpack_dict' model\(\*\*batch\)"):
            mw.plan(ByName(), "cpu*2", **asked, **more)
    assert mw.plan(ByName(), "cpu*2", model_input_format="unpack_dict", strategy=["zero1"], **asked)
    with pytest.raises(mw.ModelError, match="cannot be traced") as plain:
        mw.plan(ByName(), "cpu*2", global_batch=4, seq=8, strategy=["zero1"])
    assert "model(**batch)" not in str(plain.value)


def test_a_config_that_is_none_is_told(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(mw.ModelError, match="transformers makes no model"):
        mw.plan(f"hf:{tmp_path}", "cpu*2", global_batch=4, seq=8)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Whisper", "the decoder alone"),
        ("ResNet", "of pixel_values"),
        ("CLIP", "of input_ids, pixel_values"),
        ("Wav2Vec2", "no model"),
    ],
)
def test_a_config_of_neither_text_nor_images_names_the_way_by_functions(kind, words, tmp_path):
    transformers = pytest.importorskip("transformers")
    named = {"architectures": ["CLIPModel"]} if kind == "CLIP" else {}
    getattr(transformers, f"{kind}Config")(**named).save_pretrained(tmp_path)
    with pytest.raises(mw.ModelError, match=f"{words}.*--model MODULE:FUNCTION --sample MODULE:FUNCTION"):
        mw.plan(f"hf:{tmp_path}", "h100x2", global_batch=4, seq=8)


_BERT = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
_HEADS = {
    "classes of text": ("Bert", "ForSequenceClassification", _BERT),
    "several labels": (
        "Bert", "ForSequenceClassification", _BERT | {"problem_type": "multi_label_classification", "num_labels": 5},
    ),
    "regression": ("Bert", "ForSequenceClassification", _BERT | {"num_labels": 1}),
    "classes of tokens": ("Bert", "ForTokenClassification", _BERT),
    "spans": ("Bert", "ForQuestionAnswering", _BERT),
    "a decoder's classes": ("Llama", "ForSequenceClassification", _LLAMA),
    "speech": (
        "Whisper", "ForConditionalGeneration",
        {"d_model": 32, "vocab_size": 64, "pad_token_id": 0, "decoder_start_token_id": 1}
        | {f"{part}_{what}": n for part in ("encoder", "decoder")
           for what, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))},
    ),
}  # fmt: skip
_LITTLE = (
    "checkpoint", "compile", "context_parallel", "offload", "pipeline_parallel", "sequence_parallel", "tensor_parallel",
)  # fmt: skip


@pytest.mark.parametrize("task", _HEADS)
def test_a_model_is_planned_for_what_its_head_is_for(task, tmp_path):
    transformers = pytest.importorskip("transformers")
    kind, head, sizes = _HEADS[task]
    config = getattr(transformers, f"{kind}Config")(**sizes, architectures=[f"{kind}{head}"])
    config.save_pretrained(tmp_path)
    # The whole space once; what other heads need is no matter of what is divided.
    excluded = () if task == "classes of text" else _LITTLE
    plans = mw.plan(f"hf:{tmp_path}", "h100x2", global_batch=4, seq=16, excluded=excluded)
    assert plans[0].step.activations is not None
    assert not any("module_replace" in plan.strategy for plan in plans if task != "speech"), "there are no logits"


def test_an_encoder_with_its_decoder_is_planned_whole(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    transformers.BartConfig(d_model=32, vocab_size=64, **small, **heads).save_pretrained(tmp_path)
    (plan,) = mw.plan(f"hf:{tmp_path}", "h100x2", global_batch=4, seq=8, strategy=["fsdp"])
    assert plan.step.activations is not None


class Shared(nn.Module):
    """Layers in a list that share one weight, which sharding refuses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        for layer in self.layers:
            layer.weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def square(inputs, output):
    return output.square().mean()


def test_a_search_passes_over_what_sharding_refuses():
    asked = {"sample_batch": torch.randn(2, 64), "loss_func": square, "global_batch": 4}
    plans = mw.plan(Shared(), "h100x2", **asked)
    assert plans
    assert not {"zero1", "zero2", "fsdp"} & {name for plan in plans for name in plan.strategy.names}
    with pytest.raises(mw.ModelError, match="shared between"):
        mw.plan(Shared(), "h100x2", strategy=["fsdp"], **asked)


def test_a_choice_without_seconds_passes_over_what_sharding_refuses():
    model, inputs = Shared(), torch.randn(2, 64)
    subject = Workload(
        model, torch.device("cpu"), torch.optim.AdamW, lambda samples: inputs, lambda model, x: square(x, model(x)),
        batch_size=4, num_micro_batches=1, world=2, zero_level=3, limit_bytes=10**9,
    )  # fmt: skip
    assert [plan.strategy.names for plan in fitting(subject)] == [("parallel_mode",)]
    with pytest.raises(mw.ModelError, match="shared between"):
        choose(subject, included=["fsdp"])
    subject.limit_bytes = 1000
    with pytest.raises(mw.StrategyError, match="No strategy fits"):
        choose(subject)


@pytest.mark.parametrize(
    ("batch", "parts", "nearest"), [(8, 3, "12"), (6, 1, "4 or 8"), (2, 1, "4"), (20, 2, "16 or 24")]
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(batch, parts, nearest):
    with pytest.raises(mw.StrategyError, match=f"use {nearest}(,|\\.)"):
        mw.plan("gpt2", "h100x4", global_batch=batch, strategy=["fsdp"], num_micro_batches=parts)
    module, ids = tiny.plain(num_layers=2), torch.zeros(2, tiny.SEQ_LEN, dtype=torch.long)
    with pytest.raises(mw.StrategyError, match="does not divide"):
        mw.plan(module, "cpu*4", global_batch=6, sample_batch=ids, strategy=["fsdp"], loss_func=square)


def test_a_model_of_which_nothing_trains_is_refused():
    asked = {"sample_batch": torch.randn(2, 8), "loss_func": square, "global_batch": 4}
    with pytest.raises(mw.ModelError, match=r"Nothing of the model.*2 parameters, all of them frozen"):
        mw.plan(nn.Linear(8, 4).requires_grad_(False), "cpu*2", **asked)
    with pytest.raises(mw.ModelError, match="a model without parameters"):
        mw.plan(nn.Tanh(), "cpu*2", **asked)
    silent = nn.Linear(8, 4)
    silent.forward = torch.no_grad()(silent.forward)
    with pytest.raises(mw.ModelError, match=r"does not depend on anything that trains.*no_grad"):
        mw.plan(silent, "cpu*2", **asked)


def test_communicators_take_their_part_of_what_is_free():
    ids = torch.zeros(2, tiny.SEQ_LEN, dtype=torch.long)
    planned = mw.planning.ModuleModel("tiny", tiny.plain(num_layers=2), ids, tiny.loss_func)
    table = planned.subject(find_cluster("a100-80x8"), 32, 2**31)
    free = planned.subject(find_cluster("a100-80x8"), 32, None)  # all of a device, of which communicators take some
    axes, line = ("parallel_mode", {"data": 4, "zero": 2}), ("parallel_mode", {"data": 8})
    for mode, number in ((axes, 2), (line, 0)):  # the one axis of all ranks uses theirs
        there, here = (each.plan(mw.Strategy([mode, "zero2"])) for each in (table, free))
        assert there.communicator_bytes == 0
        assert here.communicator_bytes == number * COMMUNICATOR_BYTES
        assert here.needed_bytes - there.needed_bytes == number * COMMUNICATOR_BYTES
        tight = dataclasses.replace(here, limit_bytes=there.needed_bytes)
        assert tight.fits == (number == 0)


def test_a_pipeline_is_cut_so_that_the_gaps_of_an_allocator_fit_too():
    cluster = make_cluster("H100", 8)
    model = named_model("llama:layers=22,hidden=1024,heads=16,ffn=2816,vocab=32000,seq=1024")
    asked = ("pipeline_parallel", {"schedule": "interleaved", "num_stages_per_rank": 3})
    strategy = [("parallel_mode", {"data": 2, "pipeline": 4}), asked, ("amp_native", "bf16")]

    def planned(memory_limit):
        request = PlanRequest(model, cluster, 32, strategy=strategy, num_micro_batches=16, memory_limit=memory_limit)
        return request.found().plans[0]

    even = planned("60 GiB")
    tensors = max(memory(step).total for step in even.steps)
    found = planned((tensors + even.needed_bytes) // 2)
    assert found.fits
    assert found.cut.bounds != even.cut.bounds
    assert any("as memory allows" in notice for notice in found.notices)
    # What fits nowhere is predicted as if it did: the cut that needs least is slower than anybody would train.
    tiny = planned("200 MiB")
    assert not tiny.fits
    assert tiny.cut.bounds == even.cut.bounds
    assert tiny.forecast.time == even.forecast.time
    (least,) = [notice for notice in tiny.notices if "no cut fits" in notice]
    assert "blocks need least" in least


def test_a_memory_limit_is_no_more_than_a_device_has():
    with pytest.raises(mw.ConfigError, match=r"at most 79\.65 GiB.*Got 900\.00 GiB"):
        mw.plan("gpt2", "h100x2", global_batch=8, memory_limit="900 GiB")


class Wide(nn.Module):
    """Few parameters, and many logits."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(2**17, 16), nn.Linear(16, 2**17)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.long
def test_a_module_whose_logits_are_too_large_for_one_device_has_a_way_out():
    with torch.device("meta"):
        model = Wide()
    # 8 GiB of them in bf16, and as much of their gradients.
    asked = {"global_batch": 1, "seq": 2**15, "memory_limit": "12 GiB"}
    with pytest.raises(mw.StrategyError, match=r"logits and what the loss makes.*module_replace with loss=True") as no:
        mw.plan(model, "h100x1", excluded=["module_replace"], **asked)
    assert "smaller batch" not in str(no.value)
    (found, *_) = mw.plan(model, "h100x1", **asked)
    assert found.fits
    assert found.strategy.get("module_replace").fuses_loss


def test_a_memory_limit_is_a_size():
    cluster, shape = make_cluster("H100", 2), named_model("gpt2")
    assert PlanRequest(shape, cluster, 8, memory_limit="40 GiB").memory_limit == 40 * 2**30
    assert PlanRequest(shape, cluster, 8).memory_limit is None
    for wrong in (0, -5, "none", True, float("nan")):
        with pytest.raises(mw.ConfigError, match="memory_limit is no size"):
            PlanRequest(shape, cluster, 8, memory_limit=wrong)


class OnlyInFull(nn.Module):
    """Autocast knows no bilinear layer: fed with what it has lowered, the layer fails."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Bilinear(8, 8, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x, x)


def test_what_stops_one_precision_refuses_that_precision_alone():
    asked = {"sample_batch": torch.randn(2, 8), "loss_func": square}
    planned = mw.planning.ModuleModel("tiny", OnlyInFull(), asked["sample_batch"], square)
    found = PlanRequest(planned, make_cluster("H100", 2), 4).found()
    assert all("amp_native" not in plan.strategy and plan.step.activations for plan in found.plans)
    assert any("in lower precision" in reason for _, reason in found.refused)
    with pytest.raises(mw.ModelError, match="cannot be traced"):
        mw.plan(OnlyInFull(), "h100x2", global_batch=4, included=["amp_native"], **asked)


def test_what_no_step_can_train_is_refused_with_the_reason():
    asked = {"global_batch": 4, "sample_batch": torch.randn(2, 8), "loss_func": square, "strategy": []}
    with pytest.raises(mw.ModelError, match=r"no parameters yet.*0\.weight"):
        mw.plan(nn.Sequential(nn.LazyLinear(4)), "cpu*2", **asked)
    with pytest.raises(mw.ConfigError, match="LBFGS needs a closure"):
        mw.plan(nn.Linear(8, 4), "cpu*2", optim_func=torch.optim.LBFGS, **asked)


def test_a_length_in_tokens_is_refused_before_a_search_where_samples_have_none(monkeypatch):
    model = ModuleModel("tiny", nn.Linear(4, 4), torch.randn(2, 4), lambda _, output: output.sum())
    monkeypatch.setattr(PlanRequest, "_searched", lambda *_: pytest.fail("it searched"))
    request = PlanRequest(model, find_cluster("cpu*2"), 8, length=RunLength(tokens=1e9))
    with pytest.raises(mw.ConfigError, match="no number of tokens"):
        request.found()
