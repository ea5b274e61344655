"""The values of one proxied call, and what a request references."""
