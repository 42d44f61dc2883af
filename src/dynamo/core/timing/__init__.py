"""The time of an engine step: its model, and learning it from steps."""
