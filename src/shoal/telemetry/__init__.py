"""Events that a rank records while it runs: step timer, collectives, usage, profiler."""
