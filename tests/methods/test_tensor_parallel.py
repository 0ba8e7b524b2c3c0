"""tensor_parallel against one plain process, alone and with the other methods; see test_parity for the tolerances.

``--parity=all`` (``make parity``) trains every case.
"""

import functools

import pytest
import torch

import meshwright as mw
from tests.methods import split_runs
from tests.methods.test_parity import check_weights

MESH = ("parallel_mode", {"tensor": 2})
BOTH = ("parallel_mode", {"tensor": 2, "data": 2})
SEQUENCE = ("tensor_parallel", {"sequence": True})
KEPT = ("tensor_parallel", {"sequence": True, "keep_gathered": True})
WHOLE = ("tensor_parallel", {"sequence": True, "plan": {"model.layers.*.mlp.experts": "replicate"}})
"""Every rank has all experts, and asks them a part of the tokens."""
TWO_RANKS = [
    ("gpt2", ["tensor_parallel", MESH, "checkpoint"], "sgd", 2),
    ("plain", [SEQUENCE, MESH], "sgd", 1),
    ("olmo2", [SEQUENCE, MESH, "checkpoint"], "sgd", 2),
    ("qwen2 moe", ["tensor_parallel", MESH], "sgd", 1),
    ("extended", ["tensor_parallel", MESH], "sgd", 1),
    ("mixtral", [WHOLE, MESH], "sgd", 1),
    ("qwen2 moe", [WHOLE, MESH, "checkpoint"], "sgd", 2),
    ("gptoss", [SEQUENCE, MESH], "sgd", 1),
    ("gptoss", [SEQUENCE, MESH, "checkpoint"], "adamw", 2),
    ("gptoss", ["tensor_parallel", MESH], "sgd", 1),
    ("olmo2", ["tensor_parallel", MESH], "adamw", 1),
    ("olmo2", [SEQUENCE, MESH], "sgd", 1),
    ("olmo2", ["tensor_parallel", MESH, ("half", "bf16")], "bf16", 1),
    ("olmo2", [SEQUENCE, MESH, ("amp_native", "bf16")], "bf16", 1),
    ("olmoe", ["tensor_parallel", MESH], "sgd", 1),
    ("olmoe", [WHOLE, MESH, "checkpoint"], "sgd", 2),
    ("plain", ["tensor_parallel", MESH], "adamw", 1),
    ("odd", ["tensor_parallel", MESH], "sgd", 1),
    ("bert", ["tensor_parallel", MESH], "adamw", 1),
    ("t5", ["tensor_parallel", MESH], "sgd", 1),
    ("t5-decoder", ["tensor_parallel", MESH], "sgd", 1),
    ("gpt2", [SEQUENCE, MESH], "sgd", 1),
    ("bert", [SEQUENCE, MESH, "checkpoint"], "sgd", 1),
    ("t5", [SEQUENCE, MESH], "sgd", 1),
    ("qwen3", [SEQUENCE, MESH, ("checkpoint", {"no_reentrant": False})], "sgd", 2),
    ("llama", [SEQUENCE, MESH, ("half", "bf16")], "bf16", 1),
    ("llama", ["tensor_parallel", MESH, "checkpoint"], "sgd", 2),
    ("headless", ["tensor_parallel", MESH, ("checkpoint", {"no_reentrant": False})], "adamw", 1),
    ("qwen3", ["tensor_parallel", MESH], "sgd", 1),
    ("qwen2", ["tensor_parallel", MESH], "sgd", 1),
    ("llama", ["tensor_parallel", MESH, ("half", "bf16")], "bf16", 1),
    ("llama", ["tensor_parallel", MESH], "adamw", 1),
    ("tied", ["tensor_parallel", MESH], "sgd", 1),
    ("mixtral", ["tensor_parallel", MESH], "adamw", 1),
    ("mixtral", ["tensor_parallel", MESH, ("half", "bf16")], "bf16", 1),
    ("qwen3 moe", ["tensor_parallel", MESH, "checkpoint"], "sgd", 2),
    ("phi3", ["tensor_parallel", MESH], "sgd", 1),
    ("deepseek", ["tensor_parallel", MESH], "sgd", 1),
    ("deepseek", ["tensor_parallel", MESH, "checkpoint"], "adamw", 2),
    ("gpt2", ["tensor_parallel", MESH, ("amp_native", "bf16")], "bf16", 1),
    ("extended, tied", ["tensor_parallel", MESH, "checkpoint"], "sgd", 2),
    ("extended", [SEQUENCE, MESH], "adamw", 1),
    ("llama", [SEQUENCE, MESH], "sgd", 2),
    ("llama", [KEPT, MESH], "sgd", 1),
    ("llama", [SEQUENCE, MESH, ("amp_native", "bf16")], "bf16", 1),
    ("llama", [SEQUENCE, MESH, ("checkpoint", {"policy": "selective"})], "sgd", 1),
    ("llama", [SEQUENCE, MESH, ("offload", "activation")], "sgd", 1),
    ("gpt2", [SEQUENCE, MESH, "fp8"], "bf16", 1),
]
FOUR_RANKS = [
    ("gpt2", ["tensor_parallel", BOTH, "fsdp"], "sgd", 1),
    ("mixtral", ["tensor_parallel", BOTH, "fsdp", "checkpoint"], "sgd", 2),
    ("qwen3 moe", ["tensor_parallel", BOTH, "zero2"], "adamw", 1),
    ("llama", [SEQUENCE, BOTH, "fsdp", "checkpoint"], "sgd", 2),
    ("gptoss", [SEQUENCE, BOTH, "fsdp"], "sgd", 1),
    ("olmo2", [SEQUENCE, BOTH, "fsdp"], "sgd", 2),
    ("olmo2", ["tensor_parallel", ("parallel_mode", {"tensor": 2, "zero": 2}), "zero1"], "adamw", 1),
    ("llama", [SEQUENCE, BOTH, "fsdp"], "sgd", 2),
    ("gpt2", [SEQUENCE, BOTH, "zero2"], "adamw", 1),
    ("bert", [SEQUENCE, ("parallel_mode", {"tensor": 2, "zero": 2}), "zero1"], "sgd", 1),
    ("plain", ["tensor_parallel", BOTH], "sgd", 1),
    ("tied", ["tensor_parallel", BOTH], "sgd", 1),
    ("extended, tied", ["tensor_parallel", BOTH, "fsdp"], "sgd", 2),
    ("llama", ["tensor_parallel", BOTH, "fsdp"], "adamw", 1),
    ("tied", ["tensor_parallel", BOTH, "fsdp", "checkpoint"], "sgd", 2),
    ("bert", ["tensor_parallel", BOTH, "zero2"], "sgd", 2),
    ("qwen3", ["tensor_parallel", ("parallel_mode", {"tensor": 2, "zero": 2}), "zero1"], "sgd", 2),
    ("t5", ["tensor_parallel", BOTH, "fsdp"], "sgd", 1),
    ("headless", ["tensor_parallel", BOTH, "zero2"], "sgd", 1),
    ("llama", ["tensor_parallel", BOTH, "fsdp", ("half", "bf16")], "bf16", 1),
]
reference = functools.cache(split_runs.reference)


def cases():
    """The first six on 2 ranks and the first on 4 always, the others with ``--parity=all``."""
    for world, every, first in ((2, TWO_RANKS, 6), (4, FOUR_RANKS, 1)):
        for index, (name, methods, mode, micro) in enumerate(every):
            marks = [pytest.mark.long] if index >= first else []
            label = f"{world}-{name}-{mw.Strategy(methods)}-{mode}-{micro}"
            yield pytest.param(world, name, methods, mode, micro, marks=marks, id=label)


@pytest.mark.parametrize(("world", "name", "methods", "mode", "micro"), cases())
def test_parity(ranks, world, name, methods, mode, micro):
    (losses, norms, weights), *others = ranks(world).run(split_runs.train, name, methods, mode, micro)
    assert all(other[:2] == (losses, norms) for other in others)
    expected_losses, expected_norms, before, expected = reference(name, "sgd" if mode == "sgd" else "adamw")
    assert losses == pytest.approx(expected_losses, rel=1e-2 if mode == "bf16" else 1e-4)
    # Norms of AdamW's gradients: the weights themselves have drifted apart by rounding.
    assert norms == pytest.approx(expected_norms, rel={"bf16": 5e-2, "adamw": 1e-4, "sgd": 1e-5}[mode])
    if mode == "sgd":
        check_weights(weights, before, expected)


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(each, marks=pytest.mark.long) for each in ("tied", "mixtral"))]
)
def test_a_checkpoint_of_two_axes_loads_into_one(ranks, tmp_path, name):
    expected = ranks(4).run(split_runs.save_and_go_on, tmp_path, name, ["tensor_parallel", BOTH, "fsdp"])[0]
    for methods in (["fsdp"], ["tensor_parallel", MESH]):
        losses = ranks(2).run(split_runs.load_and_go_on, tmp_path, name, methods)[0]
        assert losses == pytest.approx(expected, rel=1e-5)


def test_fused_projections_are_stored_in_the_models_own_order(ranks, tmp_path):
    assert all(ranks(2).run(split_runs.fused_projections_are_stored_in_order, tmp_path))
    for (said,) in ranks(2).run(split_runs.odd_tokens):
        assert "does not divide the tokens" in said
        assert "multiple of 2 tokens. Got 11" in said


@pytest.mark.parametrize(
    ("name", "methods", "size"),
    [
        ("gpt2", [SEQUENCE, MESH], 6 * 20),  # two norms' weights and biases, and two biases behind sums
        ("qwen3", ["tensor_parallel", MESH], 2 * 6),  # norms of queries and of keys
        ("gpt2", [SEQUENCE, MESH, ("checkpoint", {"no_reentrant": False})], 6 * 20),
    ],
)
def test_a_block_sums_the_gradients_of_what_is_whole_at_once(ranks, name, methods, size):
    for sizes, predicted in ranks(2).run(split_runs.exchanged_sums, name, methods):
        assert (sizes.count(size), len(sizes)) == (2, predicted)


@pytest.mark.long
def test_norms_that_are_still_sharded_as_their_block_begins_sum_by_themselves(ranks):
    units = ("fsdp", {"atorch_wrap_cls": ("Qwen3Attention", "Qwen3MLP")})
    weights = ranks(4).run(split_runs.weights_after_steps, "qwen3", [SEQUENCE, BOTH, units])[0]
    *_, before, expected = reference("qwen3", "sgd")
    check_weights(weights, before, expected)


def test_ranks_of_a_tensor_group_stay_equal(ranks):
    """Rank 0's weights and one stream of dropout: whole parameters agree after steps, bit for bit."""
    for first, *others in zip(*ranks(2).run(split_runs.mlp_everywhere), strict=True):
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(other[2][name], first[2][name]) for name in first[2])
    (results, refused), *others = ranks(4).run(split_runs.mlp_with_replicas)
    assert "spare.weight" in refused
    assert "find_unused_parameters=True" in refused
    for (loss, _, weights, _), said in others:
        assert (loss, said) == (results[0], refused)
        assert all(torch.equal(weights[name], results[2][name]) for name in weights)
