"""Helpers without torch: errors, text that is safe to show, units, tables, comparisons between ranks.

`errors` has ShoalError and its subclasses, `units` is the only formatter of durations, numbers and
sizes, `text` masks and escapes, and `differences` compares. Every other package may import them.
"""
