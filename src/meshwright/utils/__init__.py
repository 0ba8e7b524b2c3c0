"""BMTrain's small tools: framed prints, memory, running averages."""

from meshwright.utils.average import AverageRecorder
from meshwright.utils.memory import see_memory
from meshwright.utils.printing import print_block, print_dict

__all__ = ["AverageRecorder", "print_block", "print_dict", "see_memory"]
