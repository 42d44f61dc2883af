"""Costs of sending a request to a worker."""
