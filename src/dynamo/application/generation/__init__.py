"""Generation requests: limits, deadlines, replies and the token fast path."""
