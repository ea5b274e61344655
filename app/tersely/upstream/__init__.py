"""Model hosts: one pooled HTTP client, and a scripted host for use without a key."""
