"""Values and interfaces that all layers share. This package does no I/O on the network."""
