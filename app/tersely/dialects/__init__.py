"""Wire formats of model providers: wire -> domain and back. Pure: no I/O, no clock, no randomness, no framework.

Each dialect is a package of three modules, ``read``, ``write`` and ``stream``, found through ``registry``; what
they share, the rules about errors included, is beside them.
"""
