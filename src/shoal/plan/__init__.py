"""Prediction of memory, step time and the best layout of a training, before it runs.

All parts are pure functions of frozen values: `machines` reads the catalogue, `model` counts
parameters, `memory` and `step_time` predict one configuration, `search` compares all valid ones,
`bands` says how far measurements are from predictions, `check` compares one with a run,
`whole_training` simulates failures, `what_if` searches with a changed machine. Only
`measure`, which measures a machine, and `trace` with its parts, which runs steps of a module, need
torch; `fit` compares a trace with a machine.
"""
