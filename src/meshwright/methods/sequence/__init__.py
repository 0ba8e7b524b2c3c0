"""How tokens are split over the sequence axis: what ``sequence_parallel`` cuts, exchanges and proves."""
