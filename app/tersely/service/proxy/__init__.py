"""The proxied call, from request to record."""
