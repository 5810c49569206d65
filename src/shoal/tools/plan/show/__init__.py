"""What `shoal plan` prints and writes."""
