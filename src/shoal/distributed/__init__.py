"""How processes become a World: placement, layout, rendezvous, collectives, watchdog."""
