"""Starting the processes of a run, and saying once and clearly which of them failed first."""
