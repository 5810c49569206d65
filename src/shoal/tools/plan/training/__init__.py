"""Whole trainings: steps, saves, failures and restarts."""
