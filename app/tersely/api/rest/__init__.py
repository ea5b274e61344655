"""Tersely's own REST API under ``/api``: one module per resource."""
