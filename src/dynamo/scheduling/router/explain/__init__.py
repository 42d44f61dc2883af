"""Records of routing decisions, for explanations and metrics."""
