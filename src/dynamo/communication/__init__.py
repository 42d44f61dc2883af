"""Planes and HTTP: bytes and sockets. Nothing here knows of models or tokens."""
