"""Deployments: their processes, planned from settings or service graphs, and their start."""
