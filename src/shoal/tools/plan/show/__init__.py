"""The documents that `shoal plan` prints and writes."""
