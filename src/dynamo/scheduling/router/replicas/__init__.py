"""Synchronisation of several routers of one model."""
