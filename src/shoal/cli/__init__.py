"""The `shoal` command: one module per group of commands. The library imports nothing from here."""
