"""`dps` without torch: all else is there, and who asks for `dps.torch` is told what to do."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import dps
dps.Worker, dps.tree
try:
    dps.torch
except ImportError as error:
    sys.exit(str(error))
"""


def test_who_has_no_torch_is_told_how_to_get_it() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("dps.torch needs torch, which is not installed: pip install torch")
