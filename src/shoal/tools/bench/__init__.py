"""Measurements: scaling studies of a model, collectives, data loading, eager and compiled modes.

`scaling`, `collectives`, `data_loading` and `compile` each have their own measurement, display and CSV
file. Only the command line imports them.
"""
