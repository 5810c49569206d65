"""Data: its order, its cut into shares, and its way to the device."""

from shoal.data.loader import Loader
from shoal.data.order import Order

__all__ = ["Loader", "Order"]
