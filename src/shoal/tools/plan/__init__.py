"""Prediction of memory, step time and the best layout of a training, before it runs.

All parts are functions of frozen values. `machine` has the catalogue and measures a machine. `work` has
plans and the work of their steps: of a transformer by its dimensions, or of a module that is traced.
`time` and `memory` predict the seconds and the bytes of that work, `search` finds the fastest plans.
`check` compares a prediction with a run, `training` simulates whole trainings, and `show` makes
documents. Only traces and measurements need torch.
"""
