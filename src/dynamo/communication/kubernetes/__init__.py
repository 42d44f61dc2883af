"""Kubernetes as a server of planes: requests to its API, objects that are followed, discovery."""
