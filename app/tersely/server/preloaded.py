"""What the process imports that workers are forked from. It outlives the signals that end a service: its parent ends it
when the last worker has ended.
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
