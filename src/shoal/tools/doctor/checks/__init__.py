"""The checks of `shoal doctor`, one module each: one function measures, another judges."""
