"""DeepSpeed's ZeRO; the variant is the stage."""

from __future__ import annotations

# user:
import deepspeed
import torch

# end
from peers.case import Case, Step, loss_func

BUCKET = 25 * 2**20 // 4  # elements in the 25 MiB of DDP's buckets; the default takes 2 GB


def setup(case: Case, variant: str) -> Step:
    deepspeed.ops.__compatible_ops__ = {}  # it would compile a sum in shared memory, which inference alone uses
    host = {"device": "cpu", "pin_memory": True}
    offload = {"offload_optimizer": host} if case.feature == "offload" else {}
    # user:
    config = {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_clipping": case.max_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": int(variant), "reduce_bucket_size": BUCKET, **offload},
        "torch_autocast": {"enabled": case.precision == "bf16", "dtype": "bfloat16"},
    }
    model = case.build()
    optim = torch.optim.AdamW(model.parameters(), **case.optim)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optim, config=config)

    def step(ids: torch.Tensor) -> torch.Tensor:
        with case.autocast():
            loss = loss_func(ids, engine(ids))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    # end
    return step
