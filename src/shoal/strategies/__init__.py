"""Parallelism strategies, and the engines that execute them.

Exports `parallelize` and `engine_of`; `contracts` is for new strategies. Import strategies from their
modules, so that unused ones cost no start-up time.
"""

from shoal.strategies.parallelize import engine_of, known_engine, parallelize

__all__ = ["engine_of", "known_engine", "parallelize"]
