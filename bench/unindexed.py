"""Run the service without building search pages in the background: `python -m bench.unindexed serve ...`.

Pages are built thirty seconds after the commits that fill them: in the middle of other cells' calls, and calls of one
cell must not pay for the messages of another. `bench.search_pages` measures what pages cost.
"""

import sys

from tersely.cli.program import main
from tersely.service.search.page_builder import PageBuilder


def _forget(_: PageBuilder, tenant: str, session_id: str, pages: int) -> None:
    """Stand in for `PageBuilder.schedule`: the first search builds the pages."""


if __name__ == "__main__":
    PageBuilder.schedule = _forget  # type: ignore[method-assign]
    sys.exit(main())
