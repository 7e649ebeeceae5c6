"""Models and data sets of experiments, by name.

A workload is pure arithmetic on named numpy arrays; it knows nothing of servers, shards or faults.
"""

from __future__ import annotations

from flows.workloads.base import Array as Array
from flows.workloads.base import Arrays as Arrays
from flows.workloads.base import Dataset as Dataset
from flows.workloads.base import DatasetShape as DatasetShape
from flows.workloads.base import DatasetSource as DatasetSource
from flows.workloads.base import Part as Part
from flows.workloads.base import Workload as Workload
from flows.workloads.base import batches as batches
from flows.workloads.datasets import DATASETS as DATASETS
from flows.workloads.datasets import Digits as Digits
from flows.workloads.datasets import FashionMnist as FashionMnist
from flows.workloads.mlp import MLP as MLP
from flows.workloads.mlp import ParityRegression as ParityRegression
from flows.workloads.mlp import SoftmaxRegression as SoftmaxRegression
from flows.workloads.objective import Objective as Objective
