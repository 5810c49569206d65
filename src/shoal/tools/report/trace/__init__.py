"""One timeline of all ranks for Perfetto and Chrome: recorded, aligned and merged."""
