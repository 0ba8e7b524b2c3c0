# ---- supplied: the block ----
from tests.seeds.supplied import DistributedTransformerBlock as SomeTransformerBlock
# ---- README of BMTrain, "Replaced" with Blocks, 16 in place of 1024 ----
import torch
import meshwright as bmt
class MyModule(bmt.DistributedModule): # changed here
    def __init__(self):
        super().__init__()
        self.param = bmt.DistributedParameter(torch.empty(16)) # changed here
        self.module_list = torch.nn.ModuleList([
            bmt.Block(SomeTransformerBlock()), # changed here
            bmt.Block(SomeTransformerBlock()), # changed here
            bmt.Block(SomeTransformerBlock())  # changed here
        ])
    
    def forward(self):
        x = self.param
        for module in self.module_list:
            x = module(x, 1, 2, 3)
        return x
