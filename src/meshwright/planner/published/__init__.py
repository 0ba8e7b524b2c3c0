"""Published runs: reading tables of them, predicting each, and saying how far off the predictions are."""
