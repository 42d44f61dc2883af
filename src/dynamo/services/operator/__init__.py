"""The operator of Kubernetes: a loop that makes objects of graphs, led by a Lease."""
