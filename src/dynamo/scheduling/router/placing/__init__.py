"""Who goes where: what waits, what every worker has in hand, and what it would cost."""
