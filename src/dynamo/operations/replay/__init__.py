"""What a trace would do on a cluster: the router, engines, caches and events themselves, under
virtual time."""
