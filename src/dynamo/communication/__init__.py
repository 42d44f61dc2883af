"""The discovery, request and event planes and the HTTP server. Knows no models and no tokens."""
