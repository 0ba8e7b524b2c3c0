# ---- supplied: the block ----
from tests.seeds.supplied import DistributedTransformerBlock as SomeTransformerBlock
# ---- README of BMTrain, "Replaced" with a TransformerBlockList, 16 in place of 1024 ----
import torch
import meshwright as bmt
class MyModule(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.param = bmt.DistributedParameter(torch.empty(16))
        self.module_list = bmt.TransformerBlockList([ # changed here
            bmt.Block(SomeTransformerBlock()),
            bmt.Block(SomeTransformerBlock()),
            bmt.Block(SomeTransformerBlock())
        ])
    
    def forward(self):
        x = self.param
        x = self.module_list(x, 1, 2, 3) # changed here
        return x
