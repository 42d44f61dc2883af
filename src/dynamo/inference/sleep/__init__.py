"""Workers that sleep: they give their memory back, and serve again within moments."""
