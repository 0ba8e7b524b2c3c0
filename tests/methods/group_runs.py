"""Parameter groups beside axes that divide the model, on the ranks of a pool."""

import torch

import meshwright as mw
from tests import tiny
from tests.methods.split_runs import whole_weights

RATES = (0.5, 1.0, 2.0)
OPTIONS = {"lr": 1e-2, "eps": 1e-4}


def groups(model):
    """Embeddings, the head, and all else that trains."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    tables = [p for name, p in named if "embedding" in name]
    head = [p for name, p in named if name.startswith("head")]
    known = {id(p) for p in (*tables, *head)}
    return [{"params": tables}, {"params": head}, {"params": [p for _, p in named if id(p) not in known]}]


def schedule(optimizer):
    """One factor for each group."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _, rate=rate: rate for rate in RATES])


def build(frozen):
    torch.manual_seed(3)
    model = tiny.gpt2.GPT2(64, tiny.SEQ_LEN, dim=20, num_layers=4, num_heads=2, tie_weights=False)
    for part in (*model.blocks[2:], model.norm, model.head) if frozen else ():
        part.requires_grad_(False)
    return model


def batches():
    return torch.randint(0, 64, (6, 4, tiny.SEQ_LEN), generator=torch.Generator().manual_seed(5))


def plain():
    """Weights of one process with a rate for each group."""
    model = build(False)
    optim = torch.optim.AdamW(groups(model), **OPTIONS)
    rates = schedule(optim)
    for batch in batches():
        optim.zero_grad()
        tiny.loss_func(batch, model(batch)).backward()
        optim.step()
        rates.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def with_rates(mesh, methods):
    """The same under a strategy: this rank's weights, and how many groups its optimizer has."""
    job = mw.accelerate(
        build(False), torch.optim.AdamW, None, tiny.loss_func, strategy=[("parallel_mode", mesh), *methods],
        optim_args={**OPTIONS, "fused": True}, optim_param_func=groups, lr_scheduler_cls=schedule,
        sample_batch=batches()[0],
    )  # fmt: skip
    for batch in batches():
        job.step(batch)
    return whole_weights(job.model), len(job.optim.param_groups)


def frozen_stage():
    """Losses of steps with a list of what trains, of which the last stage has nothing."""
    job = mw.accelerate(
        build(True), torch.optim.AdamW, None, tiny.loss_func, optim_args=OPTIONS, sample_batch=batches()[0],
        strategy=[("parallel_mode", {"pipeline": 2}), "pipeline_parallel"],
        optim_param_func=lambda model: [p for p in model.parameters() if p.requires_grad],
    )  # fmt: skip
    return [job.step(batches()[0]).loss.item() for _ in range(3)]
