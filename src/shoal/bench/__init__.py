"""Measurements: scaling studies of a model, collectives, data loading, ways to compute.

It offers `scaling`, `collectives`, `data_loading` and `compile`, each with its own measurement,
display and CSV file; only the command line imports them.
"""
