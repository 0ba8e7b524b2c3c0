"""Small runs with a tensor axis, on the ranks of a pool; used by the tests of ``tensor_parallel``."""

from unittest import mock

import torch
from torch import nn

import meshwright as mw
from meshwright.cost import memory
from meshwright.methods import gradient_averaging as replicas
from meshwright.methods.tensor.axis_exchange import TensorAxis
from meshwright.planner import measured_state
from meshwright.store import CheckpointStore, TrainingState, load_optimizer, save_optimizer
from tests import tiny
from tests.methods.test_parity import BATCH, OPTIMIZERS, STEPS
from tests.methods.test_traffic import Counter

SIZES = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 52, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": tiny.SEQ_LEN}  # fmt: skip
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
QWEN_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}


def build(name):
    """A tiny model; its weights depend on nothing but its name."""
    torch.manual_seed(3)
    model = FLOWING[name]() if name in FLOWING else with_a_plan(name)
    with torch.no_grad():
        for parameter in model.parameters():  # biases of zero and norms of one would hide what is lost
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def plain(**keys):
    return tiny.gpt2.GPT2(vocab_size=64, seq_len=tiny.SEQ_LEN, dim=20, num_layers=2, num_heads=2, **keys)


def hf_gpt2():
    import transformers

    config = transformers.GPT2Config(
        vocab_size=64, n_embd=20, n_layer=2, n_head=2, n_positions=tiny.SEQ_LEN, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def hf_bert():
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=20, intermediate_size=50, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=tiny.SEQ_LEN, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def hf_t5():
    import transformers

    config = transformers.T5Config(
        vocab_size=64, d_model=24, d_kv=6, d_ff=52, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )  # fmt: skip
    return transformers.T5EncoderModel(config)


def hf_t5_with_decoder():
    import transformers

    config = transformers.T5Config(
        vocab_size=64, d_model=24, d_kv=6, d_ff=52, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def hf_vit():
    """17 tokens: 4 x 4 patches and one for the class."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.ViTModel(config, add_pooling_layer=False)


FLOWING = {
    "vit": hf_vit,
    "t5-decoder": hf_t5_with_decoder,
    "plain": plain,
    "deep": lambda: tiny.plain(num_layers=4),
    "odd": lambda: tiny.plain(),
    "gpt2": hf_gpt2,
    "bert": hf_bert,
    "t5": hf_t5,
}
"""Models that bring no plan."""


LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def with_a_plan(name):
    import transformers

    kind, size, keys = {
        "llama": ("Llama", "ForCausalLM", {}),
        "extended": ("Llama", "ForCausalLM", {"vocab_size": 61}),
        "extended, tied": ("Llama", "ForCausalLM", {"vocab_size": 61, "tie_word_embeddings": True}),
        "ungrouped": ("Llama", "ForCausalLM", {"num_key_value_heads": 4}),
        "headless": ("Llama", "Model", {"pad_token_id": 3}),
        "tied": ("Llama", "ForCausalLM", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        "qwen2": ("Qwen2", "ForCausalLM", {"use_sliding_window": False}),
        "qwen3": ("Qwen3", "ForCausalLM", {"head_dim": 6}),
        "phi3": ("Phi3", "ForCausalLM", {"pad_token_id": 0}),
        "mixtral": ("Mixtral", "ForCausalLM", MIXTURE),
        "qwen2 moe": ("Qwen2Moe", "ForCausalLM", QWEN_MIXTURE | {"shared_expert_intermediate_size": 36}),
        "deepseek": ("DeepseekV2", "ForCausalLM", LATENT),
        "gptoss": ("GptOss", "ForCausalLM", MIXTURE | {"head_dim": 8, "sliding_window": 5, "num_hidden_layers": 2}),
        "olmo2": ("Olmo2", "ForCausalLM", {"pad_token_id": 0, "eos_token_id": 1}),
        "olmoe": ("Olmoe", "ForCausalLM", MIXTURE | {"num_experts": 4, "pad_token_id": 0, "eos_token_id": 1}),
        "qwen3 moe": ("Qwen3Moe", "ForCausalLM", QWEN_MIXTURE | {"head_dim": 6}),
    }[name]
    return getattr(transformers, kind + size)(
        getattr(transformers, kind + "Config")(**{**SIZES, **keys}, use_cache=False)
    )


BARE = ("plain", "deep", "odd")  # are called with token ids alone


def prepare_for(name):
    if name == "t5-decoder":
        return lambda data, device: {"input_ids": data.to(device), "labels": data.to(device)}
    if name == "vit":
        return lambda data, device: {"pixel_values": pixels(data).to(device)}
    return tiny.prepare_for("plain" if name in BARE else "llama")


def pixels(ids):
    """Images that token ids stand for."""
    waves = torch.outer(torch.arange(1, 3 * 16 * 16 + 1), torch.arange(1, ids.shape[1] + 1))
    return torch.sin(0.01 * waves @ ids.float().T).T.view(-1, 3, 16, 16)


def loss_func(inputs, output):
    """Next token where there are logits, else a mean that moves all features differently."""
    if isinstance(output, torch.Tensor) or hasattr(output, "logits"):
        return tiny.loss_func(inputs, output)
    features = output.last_hidden_state
    return (features * torch.linspace(-1, 1, features.shape[-1]).to(features)).square().mean()


def reference(name, mode):
    """Losses, gradient norms, initial and final weights of a plain loop in one process."""
    model = build(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optim_class, args = OPTIMIZERS[mode]
    optim = optim_class(model.parameters(), **args)
    data = tiny.Tokens()
    order = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    losses, norms = [], []
    for ids in torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=order):
        optim.zero_grad()
        inputs = prepare_for(name)(ids, "cpu")
        loss = loss_func(inputs, model(inputs) if name in BARE else model(**inputs))
        loss.backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optim.step()
        losses.append(loss.item())
        if len(losses) == STEPS:
            break
    return losses, norms, before, {key: value.detach() for key, value in model.named_parameters()}


def accelerated(name, methods, mode, micro=1, **keys):
    optim_class, args = OPTIMIZERS[mode]
    with mock.patch.object(replicas, "_BUCKET_BYTES", 4096):  # several of them, small as the models are
        return mw.accelerate(
            build(name), optim_class, tiny.Tokens(), loss_func, strategy=methods, optim_args=args,
            prepare_input=prepare_for(name), model_input_format=None if name in BARE else "unpack_dict",
            dataloader_args={"batch_size": BATCH}, num_micro_batches=micro, **keys,
        )  # fmt: skip


def train(name, methods, mode, micro=1):
    """Ten steps; losses, gradient norms and whole weights. Predicted bytes, state and wire, are checked on the way."""
    result = accelerated(name, methods, mode, micro)
    losses, norms, batch = [], [], None
    for _, batch in zip(range(STEPS), result.dataloader, strict=False):
        step = result.step(batch)
        losses.append(step.loss.item())
        norms.append(step.grad_norm.item())
    predicted = memory(result.plan.step, result._job.coordinate)
    for kind, size in measured_state(result.model, result.optim).items():
        assert getattr(predicted, kind) == size, (kind, getattr(predicted, kind), size, methods)
    weights = whole_weights(result.model)
    _check_wire_and_activations(result, batch, predicted)
    return losses, norms, weights if mw.rank() == 0 else None


def weights_after_steps(name, methods):
    """Whole weights after ten steps."""
    result = accelerated(name, methods, "sgd")
    for _, batch in zip(range(STEPS), result.dataloader, strict=False):
        result.step(batch)
    return whole_weights(result.model)


def whole_weights(model):
    """As a state dict has them: fused projections in the model's own order."""
    names = {name for name, _ in model.named_parameters()}
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
        if name in names
    }


def _check_wire_and_activations(result, batch, predicted):
    with Counter() as counter:
        _, measured = result.measured_step(batch)
    sent = {}
    for traffic in result.plan.step.traffic:
        sent[traffic.kind] = sent.get(traffic.kind, 0) + traffic.bytes_per_step
    assert counter.bytes == sent, (result.strategy, counter.bytes, sent)
    assert predicted.activations == measured["activations"] or (
        abs(predicted.activations / measured["activations"] - 1) < 0.1  # as without an axis: see test_checkpoint
    )


def exchanged_sums(name, methods):
    """Numbers in every all-reduce of one step over the tensor axis, and how many all-reduces are predicted."""
    result = accelerated(name, methods, "sgd")
    batch, sizes, reduce = next(iter(result.dataloader)), [], TensorAxis._all_reduce

    def counted(axis, tensor, operation):
        sizes.append(tensor.numel())
        reduce(axis, tensor, operation)

    with mock.patch.object(TensorAxis, "_all_reduce", counted):
        result.step(batch)
    return sizes, sum(each.count for each in result.plan.step.boundaries if each.kind == "all_reduce")


STATE = {"mode": "adamw"}


def save_and_go_on(directory, name, methods):
    """Three steps, a checkpoint, three more: their losses."""
    result = accelerated(name, methods, **STATE)
    batches = list(result.dataloader)
    for batch in batches[:3]:
        result.step(batch)
    CheckpointStore(directory).save(TrainingState(result.model, result.optim, step=3))
    shapes = {key: tuple(value.shape) for key, value in result.model.state_dict().items()}
    assert shapes == {key: tuple(value.shape) for key, value in build(name).state_dict().items()}
    return [result.step(batch).loss.item() for batch in batches[3:6]]


def load_and_go_on(directory, name, methods):
    """The same three steps after loading into another layout."""
    result = accelerated(name, methods, **STATE)
    batches = list(result.dataloader)
    result.step(batches[0])  # what is loaded replaces weights and states that have moved
    CheckpointStore(directory).load(TrainingState(result.model, result.optim))
    return [result.step(batch).loss.item() for batch in batches[3:6]]


class Mlp(nn.Module):
    """A plain model for a user's plan: an MLP by columns and rows with dropout behind it, in a Sequential."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 7), nn.Dropout(0.5)) for _ in range(2)
        )
        self.last = nn.Linear(7, 3)
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


MLP_PLAN = ("tensor_parallel", {"plan": {"layers.*.0": "colwise", "layers.*.2": "rowwise"}})


def mlp(mesh, methods=(), **keys):
    torch.manual_seed(1 + 7 * mw.rank())  # every rank starts elsewhere: rank 0's weights count
    return mw.accelerate(
        Mlp(), torch.optim.AdamW, None, lambda x, out: out.float().square().mean(),
        strategy=[MLP_PLAN, ("parallel_mode", mesh), *methods], optim_args={"lr": 0.01, "fused": True}, **keys,
    )  # fmt: skip


def overflow_on_one_rank(mesh, methods):
    """Whether four steps were skipped; before the third, one rank's shard of one gradient overflows."""
    result = mlp(mesh, [*methods, ("amp_native", "fp16")])
    result.model.spare.requires_grad_(False)
    skipped, rows = [], BATCH_OF_MLP.chunk(result.num_replicas)[result.replica]
    for step in range(4):
        result.optim.zero_grad()
        result.loss_func(rows, result.model(rows)).backward()
        if step == 2 and mw.rank() == 1:
            result.model.layers[0][0].weight.grad.to_local()[0] = float("inf")
        result.clip_grad_norm(1.0)
        result.optim.step()
        skipped.append(result.optim.step_was_skipped)
    return skipped, result.optim.scaler.get_scale()


BATCH_OF_MLP = torch.randn(8, 7, generator=torch.Generator().manual_seed(5))


def mlp_on(mesh, steps, find_unused):
    """Weights after some steps, each rank's own first; ``spare`` takes no part."""
    result = mlp(mesh, find_unused_parameters=find_unused)
    rows = BATCH_OF_MLP.chunk(result.num_replicas)[result.replica]
    for _ in range(steps):
        step = result.step(rows)
    model = getattr(result.model, "module", result.model)
    assert model.spare.weight.grad is None
    whole = {n: p.detach().clone() for n, p in model.named_parameters() if not n.startswith("layers")}
    return step.loss.item(), step.grad_norm.item(), whole, result.evaluate(rows).item()


def mlp_everywhere():
    """Dropout is equal within a tensor group, gradients are averaged over replicas, unused parameters stay."""
    assert overflow_on_one_rank({"tensor": 2}, []) == ([False, False, True, False], 2.0**15)
    results = [mlp_on({"tensor": 2}, 3, False), mlp_on({"tensor": 1, "data": 2}, 3, True)]
    result = mlp({"tensor": 2}, dry_run=True, sample_batch=BATCH_OF_MLP)
    assert type(result.model.layers[0][0].weight).__name__ == "DTensor"
    return results


def mlp_with_replicas():
    assert overflow_on_one_rank({"tensor": 2, "data": 2}, ["fsdp"]) == ([False, False, True, False], 2.0**15)
    results = mlp_on({"tensor": 2, "data": 2}, 3, True)
    refused = ""
    result = mlp({"tensor": 2, "data": 2})
    try:
        result.step(BATCH_OF_MLP)
    except mw.ModelError as error:
        refused = str(error)
    return results, refused


def one_plain_step(ids):
    """A model, its optimizer after one step in one process."""
    model = build("gpt2")
    optim = torch.optim.AdamW(model.parameters(), **OPTIMIZERS["adamw"][1])
    inputs = prepare_for("gpt2")(ids, "cpu")
    loss_func(inputs, model(**inputs)).backward()
    optim.step()
    return model, optim


def fused_projections_are_stored_in_order(folder):
    """State dicts, files of weights and files of states have the model's own order and shapes; memory is halved."""
    result = accelerated("gpt2", ["tensor_parallel", ("parallel_mode", {"tensor": 2})], **STATE)
    plain, ids = build("gpt2"), next(iter(result.dataloader))
    given = {name: value.clone() for name, value in plain.state_dict().items()}
    split = [p for p in result.model.parameters() if hasattr(p, "to_local")]
    assert sum(p.to_local().numel() for p in split) * 2 == sum(p.numel() for p in split)
    weights = whole_weights(result.model)
    assert all(torch.equal(weights[name], given[name]) for name in weights)
    mw.save(result.model, folder / "model.safetensors")
    result.step(ids)
    stepped, optim = one_plain_step(ids)
    save_optimizer(result.optim, result.model, folder / "optim.pt")
    saved = torch.load(folder / "optim.pt", weights_only=True)["state"]
    for name, parameter in stepped.named_parameters():
        torch.testing.assert_close(saved[name]["exp_avg"], optim.state[parameter]["exp_avg"], rtol=1e-4, atol=1e-7)
    lying = {p: s["exp_avg"].to_local().clone() for p, s in result.optim.state.items() if p in set(split)}
    for state in result.optim.state.values():
        state["exp_avg"].zero_()
    load_optimizer(result.optim, result.model, folder / "optim.pt")
    assert all(torch.equal(result.optim.state[p]["exp_avg"].to_local(), values) for p, values in lying.items())
    mw.load(result.model, folder / "model.safetensors")
    weights = whole_weights(result.model)
    assert all(torch.equal(weights[name], given[name]) for name in weights)
    return True


def odd_tokens():
    """What is said of a number of tokens that the axis does not divide."""
    said = []
    result = accelerated("plain", [("tensor_parallel", {"sequence": True}), ("parallel_mode", {"tensor": 2})], "sgd")
    try:
        result.step(torch.zeros(2, tiny.SEQ_LEN - 1, dtype=torch.long))
    except mw.ModelError as error:
        said.append(str(error))
    return said
