"""Small runs with a pipeline axis, on the ranks of a pool; used by the tests of ``pipeline_parallel``."""

import torch

import meshwright as mw
from meshwright.cost import memory
from meshwright.planner import measured_state
from tests import tiny
from tests.methods.test_parity import BATCH, OPTIMIZERS, STEPS

LAYERS = 4


def build(name):
    torch.manual_seed(3)
    if name == "plain":
        return tiny.plain(num_layers=LAYERS)
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=tiny.VOCAB, n_embd=20, n_layer=LAYERS, n_head=2, n_positions=tiny.SEQ_LEN, resid_pdrop=0,
                embd_pdrop=0, attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    config = LlamaConfig(
        vocab_size=64, hidden_size=24, intermediate_size=52, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=tiny.SEQ_LEN, use_cache=False,
        tie_word_embeddings=name == "tied",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def kind_of(name):
    return "plain" if name == "plain" else "llama"


def reference(name, mode="sgd"):
    """Losses, gradient norms, initial and final weights of a plain loop in one process."""
    model = build(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optim_class, args = OPTIMIZERS[mode]
    optim = optim_class(model.parameters(), **args)
    losses, norms = [], []
    for ids in batches():
        optim.zero_grad()
        inputs = tiny.prepare_for(kind_of(name))(ids, "cpu")
        loss = tiny.loss_func(inputs, model(inputs) if name == "plain" else model(**inputs))
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optim.step()
        losses.append(loss.item())
    return losses, norms, before, {key: value.detach() for key, value in model.named_parameters()}


def batches():
    data = tiny.Tokens()
    order = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=order)
    return [ids for _, ids in zip(range(STEPS), loader, strict=False)]


def accelerated(name, strategy, mode="sgd", micro=4, **keys):
    optim_class, args = OPTIMIZERS[mode]
    return mw.accelerate(
        build(name), optim_class, tiny.Tokens(), tiny.loss_func, strategy=strategy, optim_args=args,
        prepare_input=tiny.prepare_for(kind_of(name)), model_input_format=tiny.input_format(kind_of(name)),
        dataloader_args={"batch_size": BATCH}, num_micro_batches=micro, **keys,
    )  # fmt: skip


def own_weights(model):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def train(name, strategy, mode="sgd", micro=4):
    """Ten steps; losses, gradient norms and this rank's weights. Predicted bytes of state are checked on the way."""
    result = accelerated(name, strategy, mode, micro)
    losses, norms = [], []
    for _, batch in zip(range(STEPS), result.dataloader, strict=False):
        step = result.step(batch)
        losses.append(step.loss.item())
        norms.append(step.grad_norm.item())
    predicted = memory(result.plan.steps[result._job.index("pipeline")], result._job.coordinate)
    for kind, size in measured_state(result.model, result.optim).items():
        assert getattr(predicted, kind) == size, (kind, getattr(predicted, kind), size, strategy)
    return losses, norms, own_weights(result.model)
