"""The client library; imports nothing of dynamo."""
