"""Data loading: global batches and the local batches of each rank, orders and sharded datasets.

It exports `Loader` and the orders of samples. The split of a batch depends only on positions, so
that training consumes the same samples at any number of ranks.
"""

from shoal.data.loader import Loader
from shoal.data.orders import WeightedSampling
from shoal.data.permutation import Permutation
from shoal.data.shards import ShardedDataset
from shoal.data.token_budget import TokenBudget

__all__ = ["TokenBudget", "Loader", "Permutation", "ShardedDataset", "WeightedSampling"]
