"""Tersely: a context proxy for LLM agents.

Five rows; every arrow points down; packages of one row do not see each other::

                main                  builds everything; the only reader of settings and clock
                 |
             api   cli                FastAPI routers, proxy routes, schemas, error -> status; commands
                 |
              service                 use cases: load -> decide (pure) -> act -> record
        +--------+---------+------------+
      store   upstream   strategies   dialects
     (asyncpg)  (HTTP)    (pure)       (pure)
        +--------+---------+------------+
              domain                  values, invariants, errors (pure)
"""

__version__ = "0.1.0"
