"""Shadows: what another strategy would have sent, planned after the reply and stored as figures."""
