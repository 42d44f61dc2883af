"""The planner: keeps a promise of latencies with the fewest workers, within rails."""
