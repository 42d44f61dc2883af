"""The kubelet of the test cluster: pods are processes of this host.

The files of this host are those of every image. A pod has an address in 127.0.0.0/8 of its own.
"""
