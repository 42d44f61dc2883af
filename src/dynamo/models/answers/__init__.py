"""Reading of answers: reasoning, text and tool calls out of what a model writes."""
