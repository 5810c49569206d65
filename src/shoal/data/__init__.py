"""Data: its order, its cut into shares, and its way to the device."""

from shoal.data.loader import Loader
from shoal.data.orders import Weighted
from shoal.data.permutation import Order
from shoal.data.shards import Stream
from shoal.data.token_budget import Budget

__all__ = ["Budget", "Loader", "Order", "Stream", "Weighted"]
