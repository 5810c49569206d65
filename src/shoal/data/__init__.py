"""The global batch in, this rank's part out: loader, orders, shards and batches.

It offers `Loader`, `Batch` and the orders in which samples come; how a batch is divided depends
only on positions, so that the same samples are consumed at every number of ranks.
"""

from shoal.data.loader import Loader
from shoal.data.orders import WeightedSampling
from shoal.data.permutation import Permutation
from shoal.data.shards import ShardedDataset
from shoal.data.token_budget import TokenBudget

__all__ = ["TokenBudget", "Loader", "Permutation", "ShardedDataset", "WeightedSampling"]
