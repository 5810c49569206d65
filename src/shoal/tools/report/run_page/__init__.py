"""The report of one run: page, figures, tables, text."""
