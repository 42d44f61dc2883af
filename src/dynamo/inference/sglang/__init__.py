"""SGLang's Engine as an engine. SGLang is imported when it starts."""
