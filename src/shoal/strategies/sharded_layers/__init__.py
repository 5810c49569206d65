"""Layers whose parameters or results are sharded over the `tensor` axis: their plan, and their loss."""
