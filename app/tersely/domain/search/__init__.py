"""Search without a database: terms, ranking, excerpts."""
