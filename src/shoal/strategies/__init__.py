"""Ways of spreading one model over processes and devices, and the engines that execute them.

It offers `parallelize` and `engine_of`, and `contracts` for new strategies. Strategies are imported
from their modules: those that are not used cost no time at the start.
"""

from shoal.strategies.parallelize import engine_of, known_engine, parallelize

__all__ = ["engine_of", "known_engine", "parallelize"]
