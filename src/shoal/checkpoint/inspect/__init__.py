"""Checkpoints looked at from outside: listed, shown, verified, compared, exported; none is changed.

No process group, no model and no code of the user's is needed. Functions that read no
tensors import no torch.
"""
