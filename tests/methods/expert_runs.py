"""Small runs with an expert axis, on the ranks of a pool; used by the tests of ``expert_parallel``."""

import functools
from unittest import mock

import torch
from torch import nn

import meshwright as mw
from meshwright.cost import memory
from meshwright.methods import gradient_averaging as replicas
from meshwright.optim import local_tensor
from meshwright.optim.loaded_weights import masters_of
from meshwright.planner import measured_state
from meshwright.store import CheckpointStore, TrainingState
from tests import tiny
from tests.methods import test_parity
from tests.methods.split_runs import whole_weights
from tests.methods.test_parity import BATCH, STEPS
from tests.methods.test_traffic import Counter

WIDTH, EXPERTS, TOP_K = 16, 4, 2
# Momentum does not move an expert that no token of a replica has chosen.
OPTIMIZERS = test_parity.OPTIMIZERS | {"no momentum": (torch.optim.SGD, {"lr": 0.5})}


class Units(nn.Module):
    """Stacked experts, called as transformers' are."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24) * 0.2)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 24) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH) * 0.2)

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for number in range(self.num_experts):
            token, slot = torch.where(index == number)
            answer = (hidden[token] @ self.up[number] + self.bias[number]).relu() @ self.down[number]
            out = out.index_add(0, token, answer * weights[token, slot, None])
        return out


class Moe(nn.Module):
    """A router and its experts, in a list that it loops over or in a stack."""

    def __init__(self, kind):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        if kind == "stacked":
            self.units = Units()
        else:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(EXPERTS)
            )
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(TOP_K)
        if not hasattr(self, "experts"):
            return self.units(tokens, index, weights).view_as(x)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            if len(token):
                out.index_add_(0, token, (expert(tokens[token]) * weights[token, slot, None]).to(out.dtype))
        return out.view_as(x)


class Block(nn.Module):
    """A mean over what came before, for want of attention, and experts."""

    def __init__(self, kind):
        super().__init__()
        self.mix, self.norm, self.moe = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Moe(kind)

    def forward(self, x):
        x = x + self.mix(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])
        return x + self.moe(self.norm(x))


class Net(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def attending(layers):
    """A GPT with a list of experts in each block."""
    model = tiny.gpt2.GPT2(vocab_size=64, seq_len=tiny.SEQ_LEN, dim=WIDTH, num_layers=layers, num_heads=2)
    for block in model.blocks:
        block.mlp = Moe("listed")
    return model


LATENT = {
    "q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": EXPERTS, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
"""DeepSeek-V3's latent attention, shared and routed experts; the first block is dense."""


ROUTED = {"num_experts": EXPERTS, "moe_intermediate_size": 24}
GLM = {"n_routed_experts": EXPERTS, "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1,
       "n_group": 1, "topk_group": 1, "head_dim": 8}  # fmt: skip
FAMILIES = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "qwen2": ("Qwen2Moe", ROUTED | {"shared_expert_intermediate_size": 24}),
    "qwen3": ("Qwen3Moe", ROUTED | {"decoder_sparse_step": 1, "head_dim": 8}),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS, "pad_token_id": 0, "eos_token_id": 1}),
    "deepseek2": ("DeepseekV2", LATENT),
    "deepseek3": ("DeepseekV3", LATENT),
    # Four heads: the counter of bytes takes two sinks in a bucket of their own for a norm.
    "gptoss": ("GptOss", {"num_local_experts": EXPERTS, "num_attention_heads": 4, "head_dim": 8}),
    "glm4": ("Glm4Moe", GLM),
    "llama4": ("Llama4", {"num_local_experts": EXPERTS, "num_experts_per_tok": 1, "head_dim": 8, "pad_token_id": 0,
                          "intermediate_size_mlp": 24, "interleave_moe_layer_step": 1}),
}  # fmt: skip
"""Mixtures of transformers, by the names of their classes, with few and small layers."""


def hf(name, layers):
    import transformers

    kind, keys = FAMILIES["mixtral" if name == "eager" else name]
    sizes = {"vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": 2,
             "num_key_value_heads": 2, "max_position_embeddings": tiny.SEQ_LEN, "num_experts_per_tok": TOP_K,
             "intermediate_size": 24, "use_cache": False}  # fmt: skip
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Llama4" else f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**sizes | keys))
    if name == "eager":
        model.set_experts_implementation("eager")
    return model


def build(name):
    """A model of two blocks, or of as many as its name says: "mixtral 4"."""
    kind, _, layers = name.partition(" ")
    torch.manual_seed(3)
    if kind in ("stacked", "listed"):
        model = Net(kind)
    else:
        model = (attending if kind == "attending" else functools.partial(hf, kind))(int(layers or 2))
    with torch.no_grad():
        for parameter in model.parameters():  # routers of small weights would be led by rounding
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def is_plain(name):
    return name.startswith(("stacked", "listed", "attending"))


def prepare_for(name):
    return tiny.prepare_for("plain" if is_plain(name) else "llama")


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
        loss = tiny.loss_func(inputs, model(**inputs) if isinstance(inputs, dict) else model(inputs))
        loss.backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optim.step()
        losses.append(loss.item())
        if len(losses) == STEPS:
            break
    return losses, norms, before, {key: value.detach() for key, value in model.named_parameters()}


def accelerated(name, strategy, mode, micro=1, model=None):
    optim_class, args = OPTIMIZERS[mode]
    with mock.patch.object(replicas, "_BUCKET_BYTES", 4096):
        return mw.accelerate(
            model or build(name), optim_class, tiny.Tokens(), tiny.loss_func, strategy=strategy, optim_args=args,
            prepare_input=prepare_for(name), dataloader_args={"batch_size": BATCH}, num_micro_batches=micro,
            model_input_format=None if is_plain(name) else "unpack_dict",
        )  # fmt: skip


def step_of(result):
    """The simulated step of this rank's pipeline stages, or of any rank."""
    return result.plan.steps[result._job.index("pipeline")] if result.plan.steps else result.plan.step


def train(name, strategy, mode, micro=1):
    """Ten steps; losses, norms, and this rank's whole weights by name. Bytes of state and wire are those predicted."""
    result = accelerated(name, strategy, mode, micro)
    losses, norms, batch = [], [], None
    for _, batch in zip(range(STEPS), result.dataloader, strict=False):
        done = result.step(batch)
        losses.append(done.loss.item())
        norms.append(done.grad_norm.item())
    step = step_of(result)
    predicted = memory(step, result._job.coordinate)
    masters = masters_of(result.model)  # gradients of masters take the place of those of their parameters
    updated = [masters.of.get(each, each) if masters else each for each in result._job.experts.parameters()]
    idle = sum(local_tensor(each).nbytes for each in updated if each.grad is None)
    for kind, size in measured_state(result.model, result.optim).items():
        size += idle if kind == "gradients" else 0  # of experts that no token chose in the last step
        assert getattr(predicted, kind) == size, (kind, getattr(predicted, kind), size)
    weights = whole_weights(result.model)
    evaluated = result.evaluate(batch).item()
    with Counter() as counter:
        result.step(batch)
    expected = {}
    for traffic in step.traffic:
        expected[traffic.kind] = expected.get(traffic.kind, 0) + traffic.bytes_per_step
    calls = {int(value) for key, value in result.model.named_buffers() if key.endswith("calls")}
    return losses, norms, weights, (counter.bytes, expected), (evaluated, predicted.activations, calls)


def forget(model):
    """Lets every token go to the experts 0 and 1: others get none, and a rank that has the others gets no row."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Moe):
                module.router.bias.copy_(torch.tensor([9.0, 9.0, -9.0, -9.0]))
    return model


def without_tokens(name, strategy, micro=1):
    """Two steps in which one rank gets no token: how far weights, and a loss, are from those of one process."""
    torch.manual_seed(0)
    batches = torch.randint(0, 61, (2, 4, tiny.SEQ_LEN))
    result = accelerated(name, strategy, "sgd", micro, forget(build(name)))
    plain = forget(build(name))
    optim = torch.optim.SGD(plain.parameters(), **OPTIMIZERS["sgd"][1])
    for ids in batches:
        step = result.step(ids.chunk(result.num_replicas)[result.replica])
        optim.zero_grad()
        loss = tiny.loss_func(ids, plain(ids))
        loss.backward()
        optim.step()
    expected = dict(plain.named_parameters())
    weights = whole_weights(result.model)
    apart = max((value - expected[key]).abs().max().item() for key, value in weights.items())
    if name == "listed" and "pipeline_parallel" not in strategy:
        mine = [key for key in weights if ".experts." in key]
        assert {int(key.split(".experts.")[1][0]) for key in mine} == set(result._job.experts.modules[0].numbers)
    return apart, step.loss.item() - loss.item()


def apart(name, strategy, mode="no momentum", steps=STEPS):
    """Weights before and after some steps, and the bytes of the last: sent, and predicted."""
    result = accelerated(name, strategy, mode)
    before = whole_weights(result.model)
    for _, batch in zip(range(steps), result.dataloader, strict=False):
        with Counter() as counter:
            result.step(batch)
    expected = {}
    for traffic in result.plan.step.traffic:
        expected[traffic.kind] = expected.get(traffic.kind, 0) + traffic.bytes_per_step
    return before, whole_weights(result.model), (counter.bytes, expected)


class Picky(Moe):
    """Asks its experts only where it is told to."""

    asks = True

    def forward(self, x):
        return super().forward(x) if self.asks else x * 2 + self.router(x).sum()


def without_questions():
    """A step in which the block of one rank asks nothing: how far weights are from those of one process."""
    batch = torch.arange(4 * tiny.SEQ_LEN).view(4, -1) % 61
    torch.manual_seed(0)
    plain = net(Picky)
    torch.manual_seed(0)
    result = accelerated("listed", [("parallel_mode", {"expert": 2}), "expert_parallel"], "sgd", model=net(Picky))
    for block in result.model.blocks:
        block.moe.asks = mw.rank() == 0
    result.step(batch.chunk(2)[mw.rank()])
    optim = torch.optim.SGD(plain.parameters(), **OPTIMIZERS["sgd"][1])
    for ids, asks in zip(batch.chunk(2), (True, False), strict=True):
        for block in plain.blocks:
            block.moe.asks = asks
        (tiny.loss_func(ids, plain(ids)) / 2).backward()
    optim.step()
    expected = dict(plain.named_parameters())
    return max((value - expected[key]).abs().max().item() for key, value in whole_weights(result.model).items())


def save_and_go_on(directory, name, strategy):
    """Three steps, a checkpoint, three more: their losses."""
    result = accelerated(name, strategy, "adamw")
    batches = list(result.dataloader)
    for batch in batches[:3]:
        result.step(batch)
    CheckpointStore(directory).save(TrainingState(result.model, result.optim, step=3))
    said = "nothing"
    try:
        mw.save(result.model, directory / "model.safetensors")
    except mw.MeshwrightError as error:
        said = str(error)
    assert ("names of their own" in said) == (name == "listed" and "expert_parallel" in strategy), said
    return [result.step(batch).loss.item() for batch in batches[3:6]]


def load_and_go_on(directory, name, strategy):
    """The same three steps after loading into another layout."""
    result = accelerated(name, strategy, "adamw")
    batches = list(result.dataloader)
    result.step(batches[0])
    CheckpointStore(directory).load(TrainingState(result.model, result.optim))
    return [result.step(batch).loss.item() for batch in batches[3:6]]


class Jitter(Moe):
    """Changes its input in place."""

    def forward(self, x):
        x *= 1.5
        return super().forward(x)


class Chain(Moe):
    """Gives an expert what another has answered."""

    def forward(self, x):
        for expert in self.experts:
            x = x + expert(x)
        return x


def net(moe=None, **changes):
    model = Net("listed")
    for block in model.blocks:
        block.moe = moe("listed") if moe else block.moe
        for name, value in changes.items():
            setattr(block.moe, name, value)
    return model


def said_of(model, mesh, *methods):
    try:
        accelerated("listed", [("parallel_mode", mesh), *methods], "sgd", model=model)
    except mw.MeshwrightError as error:
        return str(error)
    return "nothing"


def refusals():
    """What is said of models and strategies that do not fit."""
    three = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    unlike = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)])
    pattern = ("expert_parallel", {"experts": ["blocks.*.moe.units"]})
    own = ["zero1", {"atorch_ignored_cls": ("Linear",)}]
    mesh = {"expert": 2}
    return {
        "indivisible": said_of(net(experts=three), mesh, "expert_parallel"),
        "unlike": said_of(net(experts=unlike), mesh, "expert_parallel"),
        "none": said_of(tiny.plain(), mesh, "expert_parallel"),
        "pattern": said_of(net(), mesh, pattern),
        "in place": said_of(net(Jitter), mesh, "expert_parallel"),
        "chain": said_of(net(Chain), mesh, "expert_parallel"),
        "ignored": said_of(net(), mesh, "expert_parallel", tuple(own)),
        "no method": said_of(net(), mesh),
        "no axis": said_of(net(), {"data": 2}, "expert_parallel"),
        "one rank": said_of(net(), {"expert": 1, "data": 2}, "expert_parallel"),
    }
