"""The only package that uses private names of torch.

Each function wraps one private name and says why no public one serves, and what happens where a torch
lacks it. `tests/_torch/test_private_names.py` has one test per name, so that a new torch which renames
one fails with that name. All were read in torch 2.11 and 2.13.
"""
