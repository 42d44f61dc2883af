"""Reports and alerts on routing decisions."""
