"""The native engine on PyTorch: the decoder of `inference/native` on a card, or on the CPU."""
