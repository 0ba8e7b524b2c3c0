# README of BMTrain, the first step.
import meshwright as bmt
bmt.init_distributed(
    seed=0,
    zero_level=3,   # support 2 and 3 now
    # ...
)
