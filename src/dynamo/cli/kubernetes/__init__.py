"""`dynamo kubernetes`: kinds, manifests, conversion, placement, operator and status."""
