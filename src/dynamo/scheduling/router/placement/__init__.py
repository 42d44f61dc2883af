"""Mode kv: rounds that place all pending requests at once, each where the sum of costs is least."""
