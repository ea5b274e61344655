"""Wire formats of model providers: wire -> domain and back. Pure: no I/O, no clock, no randomness, no framework.

Each dialect is a package of four modules, ``read``, ``write``, ``stream`` and ``errors``, found through
``registry``.
"""
