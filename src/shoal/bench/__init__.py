"""What a machine gives: scaling studies of a model, its collectives, its input, its ways to compute."""
