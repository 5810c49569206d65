"""How processes become a World: launchers' variables, layout, rendezvous, collectives, watchdog.

It offers `world.World` with its ranks, mesh and collectives, `env_vars` for what a launcher has
set, and `consistency` to compare facts between ranks; a world of one process has the same methods.
"""
