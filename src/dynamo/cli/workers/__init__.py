"""Commands for single workers of a running deployment."""
