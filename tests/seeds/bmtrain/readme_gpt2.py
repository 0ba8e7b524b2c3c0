# ---- supplied: the model ----
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "gpt2"))
from models import GPT
import torch
import meshwright as bmtrain
# ---- README of BMTrain, in smaller sizes and with a higher learning rate for fewer iterations ----
bmtrain.init_distributed(seed=0)
model = GPT(
    num_layers=3,
    vocab_size=61,
    dim_model=32,
    dim_head=12,
    num_heads=4,
    dim_ff=64,
    max_distance=16,
    bias=True,
    dtype=torch.half
)
bmtrain.init_parameters(model) # or loading checkpoint use `bmtrain.load`
# ... other initialization (dataset) ...
# ---- supplied: two sequences of different lengths for each rank; and what is written down ----
device = next(model.parameters()).device
generator = torch.Generator().manual_seed(bmtrain.rank())
tokens = torch.randint(0, 61, (2, 17), generator=generator).to(device)
lengths = torch.tensor([16, 11], device=device)
losses, grad_norms = [], []
# ---- README ----
loss_func = torch.nn.CrossEntropyLoss(ignore_index=-100)
optimizer = bmtrain.optim.AdamOffloadOptimizer(model.parameters(), weight_decay=1e-2)
lr_scheduler = bmtrain.lr_scheduler.Noam(optimizer, start_lr=1e-2, warmup_iter=4, end_iter=1000, num_iter=0)
# create a new instance of optimizer manager
optim_manager = bmtrain.optim.OptimManager(loss_scale=1024)
# let optim_manager handle all the optimizer and (optional) their corresponding lr_scheduler
optim_manager.add_optimizer(optimizer, lr_scheduler)
# add_optimizer can be called multiple times to add other optimizers.
for iteration in range(12):
    # ... load data for each rank ...
    # ---- supplied ----
    enc_input, enc_length = tokens[:, :-1], lengths
    targets = torch.where(torch.arange(16, device=device) < lengths[:, None], tokens[:, 1:], -100)
    # ---- README, the device chosen automatically ----
    # forward pass and calculate loss
    pos = torch.arange(enc_input.size(1)).long().to(device).repeat(enc_input.size(0), 1)
    logits = model(
        enc_input,
        pos,
        pos < enc_length[:, None]
    )
    batch, seq_len, vocab_out_size = logits.size()
    loss = loss_func(logits.view(batch * seq_len, vocab_out_size), targets.view(batch * seq_len))
    
    global_loss = bmtrain.sum_loss(loss).item() # sum the loss across all ranks. This is only used for the training log
    # zero grad
    optim_manager.zero_grad() # calling zero_grad for each optimizer
    # loss scale and backward
    optim_manager.backward(loss)
    # clip grad norm
    grad_norm = optim_manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
    # optimizer step
    optim_manager.step()
    # ... save checkpoint or print logs ...
    # ---- supplied ----
    losses.append(global_loss)
    grad_norms.append(grad_norm.item())
    bmtrain.print_rank(f"iteration {iteration} of {bmtrain.world_size()} ranks: loss {global_loss:.4f}", flush=True)
