"""The imports of the process from which workers are forked. It ignores the signals that end a service: its parent ends
it after the last worker.
"""

from __future__ import annotations

import gc
import signal

import tersely.server.run  # noqa: F401 for the workers

for _each in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_each, signal.SIG_IGN)
# A collection in a worker would write to every object, and the memory would no longer be shared.
gc.collect()
gc.freeze()
