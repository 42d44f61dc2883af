"""Scheduling: the token pipeline from text requests to a worker."""
