# ---- supplied: the blocks; the number of stages ----
import torch
import meshwright as bmt
from tests.seeds.supplied import DistributedTransformerBlock as SomeTransformerBlock
bmt.init_distributed(pipe_size=1)
# ---- update log of BMTrain 0.2.0, "ZeRO" ----
layers = bmt.TransformerBlockList([
  # ...
  # ---- supplied ----
  SomeTransformerBlock(), SomeTransformerBlock(), SomeTransformerBlock()
  # ---- update log ----
])
# ---- supplied ----
zero_layers = layers
# ---- update log, "Pipeline" ----
layers = bmt.PipelineTransformerBlockList([
  # ...
  # ---- supplied ----
  SomeTransformerBlock(), SomeTransformerBlock(), SomeTransformerBlock()
  # ---- update log ----
])
