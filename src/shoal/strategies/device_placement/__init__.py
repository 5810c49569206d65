"""Device placement: modules on several devices of one process, by a map or balanced."""
