"""Measure the input pipeline alone, and advise on the number of workers."""
