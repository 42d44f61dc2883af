"""The commands `dynamo bench` and `dynamo replay`."""
