"""The process groups that a strategy makes, on the ranks of a pool."""

import contextlib
from unittest import mock

import torch
from torch.distributed import distributed_c10d

import meshwright as mw
from meshwright.optim import CAME, Muon, muon_param_groups
from tests import tiny

OPTIMIZERS = {"muon": (Muon, muon_param_groups), "came": (CAME, None), "adamw": (torch.optim.AdamW, None)}


@contextlib.contextmanager
def recorded():
    """Record the ranks and the backend of every process group in whose making this rank takes part."""
    made, make = [], distributed_c10d._new_process_group_helper

    def making(size, rank, ranks, backend, *args, **options):
        made.append((tuple(ranks), str(backend)))
        return make(size, rank, ranks, backend, *args, **options)

    with mock.patch.object(distributed_c10d, "_new_process_group_helper", making):
        yield made


def build(layers=4):
    torch.manual_seed(3)
    return tiny.gpt2.GPT2(64, tiny.SEQ_LEN, dim=32, num_layers=layers, num_heads=4, tie_weights=False)


def of_strategy(mesh, methods, optimizer):
    """Train some steps; return the groups that were made, how many of them this rank has, and the losses."""
    batch = torch.randint(0, 64, (8, tiny.SEQ_LEN), generator=torch.Generator().manual_seed(5))
    before = len(distributed_c10d._world.pg_names)
    with recorded() as made:
        job = mw.accelerate(
            build(), OPTIMIZERS[optimizer][0], None, tiny.loss_func, sample_batch=batch,
            strategy=[("parallel_mode", mesh), *methods], optim_args={"lr": 1e-3},
            optim_param_func=OPTIMIZERS[optimizer][1],
        )  # fmt: skip
        losses = [job.step(batch).loss.item() for _ in range(4)]
    return made, len(distributed_c10d._world.pg_names) - before, losses
