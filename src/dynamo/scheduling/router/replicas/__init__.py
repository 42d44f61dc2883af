"""Routers that know what each other sends."""
