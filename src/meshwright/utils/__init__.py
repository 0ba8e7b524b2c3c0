"""BMTrain's small tools: framed prints, memory, running averages."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.utils.average import AverageRecorder
    from meshwright.utils.memory import see_memory
    from meshwright.utils.printing import print_block, print_dict
else:
    on_demand(
        __name__,
        """
        average: AverageRecorder
        memory: see_memory
        printing: print_block print_dict
        """,
    )

__all__ = ["AverageRecorder", "print_block", "print_dict", "see_memory"]
