"""Stages on named ranks that call each other by torch RPC."""
