"""Limits of tenants and keys, kept across workers, and turns between tenants."""
