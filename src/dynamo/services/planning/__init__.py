"""The notes of a deployment about its own load, for replays and plans."""
