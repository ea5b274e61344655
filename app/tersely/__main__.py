"""``python -m tersely``."""

import sys

from tersely.cli import main

sys.exit(main())
