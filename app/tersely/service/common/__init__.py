"""Common parts of the service: tokens, metrics, callers' keys, threads for long work."""
