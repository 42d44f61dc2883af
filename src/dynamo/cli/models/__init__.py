"""Commands about a model before it is served: engines, files, export."""
