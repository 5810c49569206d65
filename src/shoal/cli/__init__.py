"""The `shoal` command: options in, one call of the library, output.

It offers `main.main`, with one module per group of commands; the library imports nothing from here.
"""
