"""Embedding models: encoders of the BERT shape in NumPy, behind the endpoint `embed`."""
