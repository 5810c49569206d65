"""Checkpoints looked at from outside: listed, shown, verified, compared, exported; none is changed.

No process group, no model and no code of the user's is needed. What reads no tensors imports no torch.
"""
