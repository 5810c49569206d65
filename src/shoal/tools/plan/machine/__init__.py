"""Machines: the catalogue, files of the same form, and measurements of this one."""
