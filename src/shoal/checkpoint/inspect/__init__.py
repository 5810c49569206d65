"""Read-only inspection of checkpoints: list, show, verify, compare, export.

It needs no process group, no model and no user code. Functions that do not read tensors do not import
torch.
"""
