"""Creation of the World: launchers' variables, layout, rendezvous, collectives, watchdog.

`world.World` has the ranks, mesh and collectives, `env_vars` reads the variables of the launcher, and
`consistency` compares facts between ranks. A world of one process has the same methods.
"""
