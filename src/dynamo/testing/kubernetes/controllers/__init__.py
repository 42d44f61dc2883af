"""The controllers of the test cluster that deployments rely on."""
