"""Data: its order, its cut into shares, and its way to the device."""

from shoal.data.audit import coverage
from shoal.data.budget import Budget
from shoal.data.loader import Loader
from shoal.data.order import Order
from shoal.data.ordering import Weighted
from shoal.data.stream import Stream

__all__ = ["Budget", "Loader", "Order", "Stream", "Weighted", "coverage"]
