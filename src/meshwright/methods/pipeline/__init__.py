"""How a model runs in stages: what ``pipeline_parallel`` cuts, splices and schedules."""
