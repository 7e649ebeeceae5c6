"""The way to torch: it is imported only for what needs it, and asked for where it is missing."""

from __future__ import annotations

import pytest

from dps.errors import ConfigurationError
from flows.workloads import Digits
from flows.workloads.with_torch import find, torch_module


def test_who_has_no_torch_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.workloads.with_torch.find_spec", lambda name: None)
    message = (
        r"install the extra torch: in a clone of dps, `make torch` or pip install -e '\.\[torch\]'"
    )
    with pytest.raises(ConfigurationError, match=message):
        torch_module(Digits.shape, "flows.workloads.torch_module:conv_net")
    with pytest.raises(ConfigurationError, match=message):
        find("torch.nn.functional:cross_entropy")
