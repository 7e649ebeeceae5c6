"""The way to torch: it is imported only for what needs it, and asked for where it is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dps.errors import ConfigurationError
from flows.workloads import SHAPES, build_workload
from flows.workloads.with_torch import find


@pytest.mark.slow
def test_torch_is_imported_only_for_what_needs_it() -> None:
    code = (
        "import sys, flows.execution.trial; from flows.config.experiment import load_experiment;"
        "load_experiment('demo');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_who_has_no_torch_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.workloads.with_torch.find_spec", lambda name: None)
    message = (
        r"install the extra torch: in a clone of dps, `make torch` or pip install -e '\.\[torch\]'"
    )
    with pytest.raises(ConfigurationError, match=message):
        build_workload("cnn", SHAPES["digits"])
    with pytest.raises(ConfigurationError, match=message):
        find("torch.nn.functional:cross_entropy")
