"""One optimizer step, the run directory, the training loop, evaluation and export.

It offers `Run`, `train` and the train state with what happens around a step: schedules, preemption,
early stopping, averages of parameters; a script takes these from `shoal` itself.
"""
