"""How layers are split over the tensor axis: what ``tensor_parallel`` finds out, proves and changes."""
