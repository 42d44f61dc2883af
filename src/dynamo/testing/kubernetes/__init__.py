"""A Kubernetes cluster within a test: an API server, the controllers that deployments rely on, and
a kubelet whose pods are processes."""
