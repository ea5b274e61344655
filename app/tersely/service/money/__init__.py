"""Prices of models, and the costs and savings of calls."""
