"""What the fork server imports first: no garbage collection until a node is forked, and then less.

Modules last as long as the process. Collections would look through all that they hold again and
again: while they are imported, in each node, which copies the memory that they touch, and once more
when the server ends.
"""

from __future__ import annotations

import gc
import os

gc.disable()
os.register_at_fork(before=gc.freeze, after_in_child=gc.enable)
