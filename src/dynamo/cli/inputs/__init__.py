"""The inputs of `dynamo run` besides HTTP: `in=text` and `in=batch:FILE.jsonl`."""
