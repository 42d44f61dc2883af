"""Placement of gangs on the nodes of a cluster, by levels of its network: best fit, all or nothing.

A library without I/O. The operator, simulations and `dynamo kubernetes place` use it.
"""
