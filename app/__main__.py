"""``python -m app``, for checkouts: the same as ``python -m tersely``."""

import sys

from tersely.cli import main

sys.exit(main())
