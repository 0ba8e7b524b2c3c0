"""pipeline_parallel: what a plain process does too, what it refuses, and how failures end."""

import pytest
import torch

import meshwright as mw
from meshwright.methods.pipeline.schedules import in_flight_peaks
from tests import tiny
from tests.methods import pipeline_runs as runs
from tests.methods.test_parity import BATCH


def test_loops_shapes_and_what_is_unknown(ranks):
    """Schedules, loops by hand, changing shapes, several hidden states, buffers, and an untraced model: all equal."""
    losses, weights = runs.pairs_reference(3)
    every = ranks(2).run(runs.several)
    for rank, results in enumerate(every):
        for case, (own, held, evaluated, calls) in results.items():
            assert own == pytest.approx(losses, rel=1e-5), case
            assert evaluated == every[0][case][2]
            for name, value in held.items():
                assert torch.allclose(value, weights[name], atol=1e-6), (case, rank, name)
            # Twice per step; learning the shapes leaves no trace, nor does recomputing.
            assert calls == [6] * 2, case
    held = [set(results["scheduled"][1]) for results in every]
    assert held[0] & held[1] == {"scale"}  # all blocks use it
    assert held[0] - held[1] > {"bias", "first.weight"}
    assert held[1] - held[0] > {"last.weight"}
    assert {"bias", "last.weight"} < set(every[0]["untraced"][1])  # nobody knows who needs them


def test_a_stage_that_fails_fails_everywhere(ranks):
    for said, loss in ranks(2).run(runs.failing):
        scheduled, learned, misshapen, ragged = said
        assert scheduled.startswith("ValueError: on purpose")
        assert "ValueError: on purpose" in learned
        assert "size of tensor a (7)" in misshapen
        assert "ValueError: on purpose" in ragged
        assert loss == pytest.approx(0.2, abs=0.1)


@pytest.mark.long
def test_a_stage_that_fails_leaves_no_gradients_in_shards(ranks):
    plain = ranks(2).run(runs.failing)[0]
    for said, loss in ranks(4).run(runs.failing, ["fsdp"], {"zero": 2}):
        assert said == plain[0]
        assert loss == pytest.approx(plain[1], rel=1e-5)


def test_an_optimizer_that_is_built_keeps_this_ranks_part(ranks):
    for (losses, sizes), expected in zip(ranks(2).run(runs.with_built_optimizer), ([2, 6], [3, 4]), strict=True):
        assert losses == pytest.approx(runs.pairs_reference(3)[0], rel=1e-5)
        assert sizes == expected


def test_overflow_skips_all_stages(ranks):
    assert ranks(2).run(runs.overflowing) == [([False, True, False], 2.0**15)] * 2


def test_checkpoints_hold_the_whole_model(ranks, tmp_path):
    for by_stages, into_shards, by_shards, into_stages in ranks(2).run(runs.checkpoints, tmp_path):
        assert into_shards == pytest.approx(by_stages, abs=1e-5)
        assert into_stages == pytest.approx(by_shards, abs=1e-5)
    assert ranks(1).run(runs.load_plain, tmp_path)[0] == pytest.approx(by_stages, abs=1e-5)
    assert max(by_stages) - min(by_stages) > 1e-3


def check_predictions(results):
    for sent, predicted, kept, foreseen in (each for result in results for each in result):
        assert sent == predicted
        assert foreseen == pytest.approx(kept, rel=0.1)  # as without stages: see test_checkpoint


def test_what_is_sent_and_kept_is_predicted(ranks):
    schedules = ["gpipe", "1f1b", "interleaved", "zbv"]
    cases = [("plain", [runs.TWO, ("pipeline_parallel", {"schedule": each})]) for each in schedules]
    check_predictions(ranks(2).run(runs.sent_and_kept, cases))


def test_messages_that_have_arrived_are_let_go(ranks):
    """A step of 24 micro-batches holds as many messages as one of few does."""
    schedules, micro = ["1f1b", "interleaved", "zbv", "dualpipev"], 24
    for rank, results in enumerate(ranks(2).run(runs.alive_messages, schedules, micro)):
        for schedule, (sent, most, left) in zip(schedules, results, strict=True):
            stages = 1 if schedule == "1f1b" else 2
            assert max(sent.values()) >= micro
            # A hidden state is kept until its stage has run backward, as it would be without being sent.
            in_flight = sum(dict(in_flight_peaks(schedule, 2, stages, micro)[rank][-1]).values())
            assert most["F"] <= in_flight + 1, (schedule, rank, sent, most)
            assert most["B"] <= 3, (schedule, rank, sent, most)
            assert not left


@pytest.mark.long
def test_what_is_sent_beside_other_axes_is_predicted(ranks):
    axes = [(["tensor_parallel"], "tensor"), ([], "data"), (["fsdp"], "zero")]
    cases = [
        ("llama", [*each, "pipeline_parallel", ("parallel_mode", {"pipeline": 2, axis: 2})]) for each, axis in axes
    ]
    check_predictions(ranks(4).run(runs.sent_and_kept, cases))


TOKENS = [("parallel_mode", {"tensor": 2, "pipeline": 2}), ("tensor_parallel", {"sequence": True})]


def test_stages_hand_on_the_tokens_of_a_tensor_rank(ranks):
    strategy = [*TOKENS, ("pipeline_parallel", {"schedule": "zbv"}), "checkpoint"]
    results = ranks(4).run(runs.sent_and_kept, [("llama", strategy)])
    check_predictions(results)
    handed_on = BATCH * tiny.SEQ_LEN // 2 * 24 * 4  # by a stage in a step, in fp32, and as much by a gradient
    assert all(sent["send"] == 2 * handed_on for ((sent, *_),) in results)


@pytest.mark.long
def test_code_before_the_blocks_sends_in_every_stage(ranks):
    """An embedding that is split by words sums its rows wherever it runs."""
    strategy = [*TOKENS, ("pipeline_parallel", {"schedule": "interleaved"}), "checkpoint"]
    cases = [("tied", strategy), ("gpt2", [*TOKENS, ("pipeline_parallel", {"schedule": "1f1b"})])]
    check_predictions(ranks(4).run(runs.sent_and_kept, cases))


@pytest.mark.long
def test_half_precision(ranks):
    for losses in ranks(2).run(runs.halves):
        for own in losses.values():
            assert own == pytest.approx([4.11738, 4.10620, 4.09627], rel=1e-2)


IGNORED = {"atorch_ignored_cls": "LayerNorm"}


def refusals():
    """What each wrong configuration is answered with."""
    said = {}
    cases = {
        "few": ({"schedule": "1f1b"}, 1, {}),
        "stages": ({"schedule": "interleaved", "num_stages_per_rank": 4}, 8, {}),
        "split": ({"split": [3, 3]}, 2, {}),
        "blocks": ({"blocks": "layer"}, 2, {}),
        "schedule": ({"schedule": "1f2b"}, 2, {}),
        "number": ({"schedule": "zbv", "num_stages_per_rank": 3}, 2, {}),
        "atorch": ({"shard_planner": "base"}, 2, {}),
    }
    for case, (config, micro, keys) in cases.items():
        try:
            runs.pairs([("pipeline_parallel", config)], micro, **keys)
        except mw.MeshwrightError as error:
            said[case] = str(error)
    for case, method in {"reentrant": ("checkpoint", {"no_reentrant": False}), "ignored": ("fsdp", IGNORED)}.items():
        try:
            runs.pairs([method, ("pipeline_parallel", {"schedule": "zbv"})], mesh={"zero": 1})
        except mw.MeshwrightError as error:
            said[case] = str(error)
    models = {"listless": torch.nn.Linear(6, 3), "residual": Residual(), "lists": Lists(), "skip": Skip()}
    compiled = Chain()
    compiled.layers[1].compile(backend="eager")
    for case, model in {**models, "odd": Odd(), "shared": Shared(), "compiled": compiled}.items():
        try:
            strategy = [("parallel_mode", {"pipeline": 2}), "pipeline_parallel"]
            sample = torch.ones(2, 6)
            mw.accelerate(
                model, torch.optim.SGD, None, runs.square, strategy=strategy, sample_batch=sample,
                optim_args={"lr": 0.1}, num_micro_batches=2,
            )  # fmt: skip
        except mw.MeshwrightError as error:
            said[case] = str(error)
    return said


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))


class Residual(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Skip(Layers):
    def forward(self, x):
        return self.layers[0](self.layers[1](x))


class State:
    """A hidden state that is no tensor."""

    def __init__(self, x):
        self.x = x


class Wrapped(torch.nn.Linear):
    def forward(self, state):
        return State(super().forward(state.x))


class Odd(Layers):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Wrapped(6, 6) for _ in range(2))

    def forward(self, x):
        state = State(x)
        for layer in self.layers:
            state = layer(state)
        return state.x


class Chain(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Shared(Chain):
    def __init__(self):
        super().__init__()
        self.layers[1].weight = self.layers[0].weight


class Lists(Layers):
    def __init__(self):
        super().__init__()
        self.decoder = torch.nn.ModuleList([torch.nn.Linear(6, 6)])


def test_what_cannot_be_cut_is_refused_everywhere(ranks):
    first, second = ranks(2).run(refusals)
    assert first == second
    expected = {
        "few": "at least 2, one for every stage. Got 1",
        "stages": "at least 8 blocks, one for every stage. Got 4",
        "split": "add up to 4. Got [3, 3]",
        "blocks": "did you mean 'layers'",
        "schedule": "'gpipe', '1f1b', 'interleaved', 'zbv' or 'dualpipev'",
        "number": "2 for zbv and dualpipev",
        "atorch": "balanced by their time",
        "residual": "adding the residual",
        "listless": "0 that hold parameters (none)",
        "lists": "2 that hold parameters (layers, decoder)",
        "shared": "layers.0.weight, which is also layers.1.weight",
        "reentrant": "leave no_reentrant out",
        "ignored": "leave these keys out",
        "odd": "an output of type State",
        "compiled": "compile() was called on layers.1",
        "skip": "calls every block once, in the order of the list",
    }
    for case, words in expected.items():
        assert words in first[case], (case, first.get(case))
