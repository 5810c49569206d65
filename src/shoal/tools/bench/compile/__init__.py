"""Measure a Python loop, torch's operations, TorchScript and `torch.compile`."""
