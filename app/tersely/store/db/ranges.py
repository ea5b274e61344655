"""The end of ranges that have none.

The service's statements are planned once, without a look at their parameters. Of ``seq >= $3`` the planner then expects
a third of all rows, so it reads the whole table where one session has most of it. Of a range with two ends it expects
one row in two hundred, and uses the index. The end of times is ``'infinity'``.
"""

from __future__ import annotations

from typing import Final

END: Final = 2**63 - 1
"""Is greater than any sequence number."""
