"""Import of training states that other tools saved: `shoal checkpoint import`."""
