"""Strategies whose workers do not wait for each other: Hogwild, a parameter server."""
