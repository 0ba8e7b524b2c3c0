"""Record what a model computes and saves, without data."""
