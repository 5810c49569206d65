"""Scaling studies: a model or a script on 1, 2, 4 … processes, strong and weak scaling."""
