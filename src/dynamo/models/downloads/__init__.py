"""Downloads of models from package indexes and the Hugging Face hub."""
