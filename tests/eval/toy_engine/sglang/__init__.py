"""Takes SGLang's place in the launcher's tests: a real process with real children, log and HTTP server, and no model."""
