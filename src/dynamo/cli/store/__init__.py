"""`dynamo store`: the fetched models on this machine."""
