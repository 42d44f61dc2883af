"""The fast replay: workers as state machines on one heap, with the router's own solver."""
