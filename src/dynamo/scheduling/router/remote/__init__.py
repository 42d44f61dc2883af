"""A router in a process of its own."""
