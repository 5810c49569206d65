"""One optimizer step, the run directory, the training loop, evaluation, export."""
