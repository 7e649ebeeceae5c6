"""The way to torch: it is imported only for what needs it, and asked for where it is missing."""

from __future__ import annotations

import pytest

from dps.errors import ConfigurationError
from flows.workloads import Digits
from flows.workloads.with_torch import find, torch_module


def test_without_torch_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.workloads.with_torch.find_spec", lambda name: None)
    message = "needs torch, which is not installed: pip install torch"
    with pytest.raises(ConfigurationError, match=message):
        torch_module(Digits.shape, "flows.workloads.torch_module:conv_net")
    with pytest.raises(ConfigurationError, match=message):
        find("torch.nn.functional:cross_entropy")
