"""Measurements: speed, memory and flatness, each with the command that repeats it.

`python -m bench` runs the speed table; `python -m bench.memory` and `python -m bench.context_flat` add
their own sections to the same `results.json` and `results.md`.
"""
