"""A live page of a run directory in a terminal."""
