"""Pipeline parallelism: cut a model into stages, splice it, run torch's schedules."""
