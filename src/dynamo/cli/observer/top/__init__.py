"""`dynamo top`: what a deployment does now, in a terminal."""
