"""`dynamo doctor`: checks of this machine, its network, the planes and a running deployment."""
