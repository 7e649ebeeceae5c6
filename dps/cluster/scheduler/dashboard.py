"""Offers the page of `dashboard_page.py` on Dask's dashboard, where Dask serves one.

Without a dashboard, which takes bokeh, nothing of it is imported.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)

PAGE = "dps"
PLOT = "individual-dps"  # the same without the bar of links, as Dask has it of each of its plots


def offer_page(scheduler: Any) -> None:
    """Add the page to a scheduler's dashboard, if it has one and it is not there yet.

    A dashboard that cannot be added to, as that of a Dask to come, is left as it is, with a warning
    in the scheduler's log: no training fails by that.
    """
    if "bokeh" not in sys.modules:
        return
    served = getattr(scheduler, "http_application", None)
    with_pages = [app for app in getattr(served, "applications", ()) if hasattr(app, "app_paths")]
    paths = {path for app in with_pages for path in app.app_paths}
    if "/status" not in paths or f"/{PAGE}" in paths:
        return
    try:
        from dps.cluster.scheduler.dashboard_page import serve

        serve(scheduler, with_pages[0].prefix, PAGE, PLOT)
    except Exception as error:
        logger.warning("Dask's dashboard has no page of dps: %r", error, exc_info=True)
