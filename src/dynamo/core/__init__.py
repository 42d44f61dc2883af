"""Frozen values and contracts that every layer shares. Nothing here does I/O."""
