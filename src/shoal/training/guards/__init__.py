"""Guards against silent data corruption in a run: checksums of parameters and optimizer state."""
