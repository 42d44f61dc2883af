"""Connectors of the planner: what it sees of a deployment, and how it changes it."""
