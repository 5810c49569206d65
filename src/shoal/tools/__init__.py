"""Tools around a training: nothing that trains imports them."""
