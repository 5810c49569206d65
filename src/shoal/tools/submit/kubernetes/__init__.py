"""Kubernetes, with the JobSet API."""
