"""The native engine: Llama-shaped models in NumPy."""
