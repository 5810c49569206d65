"""Prediction of memory, step time and the best layout of a training, before it runs.

All parts are pure functions of frozen values: `machines` reads the catalogue, `model` counts
parameters, `memory` and `step_time` predict one configuration, `pipeline_run` simulates the schedule
of a pipeline. `candidates` lists all valid configurations, `bounds` screens them and `search` finds the
fastest, `device_numbers` does so on several numbers of devices. `bands` says how far measurements are
from predictions, `check` compares one with a run, and `machine_update` lets a machine file follow the
run. `whole_training` simulates failures, and `what_if` searches with a changed machine. Only
`pipeline_run`, which reads torch's schedules, `measure`, which measures a machine, and `trace` with its
parts, which runs steps of a module, need torch; `fit` compares a trace with a machine.
"""
