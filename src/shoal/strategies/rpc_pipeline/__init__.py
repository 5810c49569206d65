"""RPC pipeline: stages on chosen ranks that send each other messages through torch RPC."""
