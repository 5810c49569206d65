"""Layers that couple the samples of a batch: groups of positions, and sums over them on any ranks."""
