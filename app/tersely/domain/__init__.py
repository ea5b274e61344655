"""Values, invariants and errors of Tersely. Pure: no framework, no I/O, no clock, no randomness."""
