"""The checks of `shoal doctor`, one module each: `look` measures, `judge` decides."""
