"""Strategies: named, configured ways to build a context out of small stages. Pure: no I/O, no clock, no randomness.

A strategy answers two questions apart: *when* does a new epoch start (`epochs.decide_epoch`), and *what* does it
start with (`planning.plan_epoch`). Between two epochs a context only grows at its end (`planning.build`).
"""
