"""The connection pool, transactions, statements, migrations."""
