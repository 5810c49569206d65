"""Random numbers of layers such as dropout that belong to samples, for any split of the batch.

`parallelize` calls `register` for the modules of a model, and a step calls `forget` at its end.
"""
