"""The adaptive balancer."""
