"""Bytes of a rank, from dimensions or from the storages that live in a trace."""
