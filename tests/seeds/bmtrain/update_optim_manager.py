# ---- supplied: a model in two parts, an optimizer for each, and data ----
import torch
import meshwright as bmtrain
from tests.seeds.supplied import DIM, DistributedTransformerBlock
bmtrain.init_distributed(seed=0)
model = bmtrain.TransformerBlockList([DistributedTransformerBlock() for _ in range(2)])
model.load_state_dict(weights)  # given by the test
optimizer = bmtrain.optim.AdamOptimizer(model[0].parameters(), lr=1e-2, weight_decay=1e-2)
lr_scheduler = bmtrain.lr_scheduler.Noam(optimizer, start_lr=1e-1, warmup_iter=2, end_iter=1000)
other_optimizer = torch.optim.SGD(model[1].parameters(), lr=1e-1, momentum=0.9)
losses = []
# ---- update log of BMTrain 0.2.0, "After 0.2.0" ----
# create a new instance of optimizer manager
optim_manager = bmtrain.optim.OptimManager(loss_scale=1024)
# let optim_manager handle all the optimizer and (optional) their corresponding lr_scheduler
optim_manager.add_optimizer(optimizer, lr_scheduler)
# add_optimizer can be called multiple times to add other optimizers.
# ---- supplied ----
optim_manager.add_optimizer(other_optimizer)
# ---- update log, 10 in place of 1000 ----
for iteration in range(10):
    # zero grad
    optim_manager.zero_grad() # calling zero_grad for each optimizer
    
    # ...
    # ---- supplied ----
    loss = (model(inputs, 1, 2, 3) - targets).square().mean()  # both are given by the test
    losses.append(bmtrain.sum_loss(loss).item())
    # ---- update log ----
    # loss scale and backward
    optim_manager.backward(loss)

    # optimizer step
    optim_manager.step()
