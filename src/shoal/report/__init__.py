"""What a run's time went into, for people: a page with figures, a text for terminals, the numbers.

Read from the events of a run directory, while it runs or after a crash; nothing of it is changed but
the report's own folder in it.
"""
