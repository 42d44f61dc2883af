"""Processes of a deployment: supervisor, children, control, reload, status."""
