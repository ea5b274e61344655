"""Whose history a request carries: hashing it and finding its session."""
