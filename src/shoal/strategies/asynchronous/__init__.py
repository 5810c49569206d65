"""Asynchronous strategies: Hogwild, in shared memory or with a parameter server."""
