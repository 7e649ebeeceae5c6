"""Contracts: test suites of rules, filters, durabilities, workloads, data sets and faults.

Derive a class from one of them whose name begins with ``Test``, and override the fixture that gives
what is tested; pytest does the rest.
"""

from dps.testing.contracts.datasets import DatasetContract
from dps.testing.contracts.durabilities import DurabilityContract
from dps.testing.contracts.faults import FaultContract
from dps.testing.contracts.filters import FilterContract
from dps.testing.contracts.rules import RuleContract
from dps.testing.contracts.workloads import WorkloadContract

__all__ = [
    "DatasetContract",
    "DurabilityContract",
    "FaultContract",
    "FilterContract",
    "RuleContract",
    "WorkloadContract",
]
