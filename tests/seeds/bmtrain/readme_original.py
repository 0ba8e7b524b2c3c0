# ---- supplied: the block ----
from tests.seeds.supplied import PlainTransformerBlock as SomeTransformerBlock
# ---- README of BMTrain, "Original", 16 in place of 1024 ----
import torch
class MyModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.param = torch.nn.Parameter(torch.empty(16))
        self.module_list = torch.nn.ModuleList([
            SomeTransformerBlock(),
            SomeTransformerBlock(),
            SomeTransformerBlock()
        ])
    
    def forward(self):
        x = self.param
        for module in self.module_list:
            x = module(x, 1, 2, 3)
        return x
