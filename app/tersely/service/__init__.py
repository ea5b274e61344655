"""Use cases: load, decide (pure), act, record. The one place where the pure and the impure meet."""
