"""The only package that uses private names of torch, and of torchmetrics.

Each function wraps one private name and says why no public one can be used. `names.NAMES` lists all of
them, with the effect if a torch lacks one. `tests/_torch/test_private_names.py` has a test for each, so
that a new torch which renames one fails with that name. All were read in torch 2.11 and 2.13.
"""
