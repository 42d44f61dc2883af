"""Policies of the planner: how many workers a demand wants."""
