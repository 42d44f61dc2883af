"""Snapshots: a process that has loaded a model, saved to a folder, from which workers start."""
