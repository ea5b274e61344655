"""Random histories in every dialect against models that refuse what providers refuse."""
