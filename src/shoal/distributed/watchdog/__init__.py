"""Ranks that wait for one that never comes: noticed, explained in one line, and ended.

Every rank has a thread and a socket of its own for this, since a rank that hangs runs nothing else.
"""
