"""Import of training states that other tools saved: `shoal checkpoint import`."""

IMPORTED = "imported"
"""The entry of a state that comes from another tool: a Run completes it when it restores it."""
