"""RPC pipeline: stages on chosen ranks that call each other through torch RPC."""
