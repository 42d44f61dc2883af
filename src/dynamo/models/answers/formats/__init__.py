"""Readers of the formats in which models write tool calls."""
