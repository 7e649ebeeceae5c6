"""Imports of the fork server, for every node; only imported there.

Modules last as long as the process, so garbage collection is off until a node is forked. It would
traverse them repeatedly: during the imports, in each node, which copies the memory that it touches,
and when the server ends.
"""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from importlib import import_module

gc.disable()
os.register_at_fork(before=gc.freeze, after_in_child=gc.enable)

# Dask's processes import prometheus_client if it is installed, and the modules below it only when
# they start, or send the first array.
for _name in (
    "dps.cluster.backends.local",
    "prometheus_client",
    "distributed.http.prometheus",
    "distributed.protocol.numpy",
    "email.policy",
    "tornado.platform.asyncio",
):
    with suppress(ImportError):
        import_module(_name)
