"""Data: its order, its cut into shares, and its way to the device."""

from shoal.data.loader import Loader
from shoal.data.orders import WeightedSampling
from shoal.data.permutation import Permutation
from shoal.data.shards import ShardedDataset
from shoal.data.token_budget import TokenBudget

__all__ = ["TokenBudget", "Loader", "Permutation", "ShardedDataset", "WeightedSampling"]
