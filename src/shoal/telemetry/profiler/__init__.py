"""Windows of steps recorded by torch's profiler, and requests for them."""
