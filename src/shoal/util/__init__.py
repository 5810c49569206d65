"""Helpers without torch: errors, text that is safe to show, units, tables, comparisons between ranks.

It offers `errors.ShoalError` and its subclasses, `units` as the only formatter of durations,
numbers and sizes, `text` for masking and escaping, and `differences`; every other package may
import it.
"""
