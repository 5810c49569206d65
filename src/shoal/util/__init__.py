"""Helpers without torch: errors, text, tables, units."""
