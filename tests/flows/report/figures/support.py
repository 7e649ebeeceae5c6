"""Trials to draw: a toy experiment, and the lines that an axes shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from flows.analysis.outcome import outcome
from flows.analysis.prices import load_prices
from flows.records.record import Record
from flows.report.figures.dataset import Subject, Trial
from tests.support.synthetic import toy_events


def trials(
    strategies: Sequence[str] = ("none", "chain"),
    faults: Sequence[str] = ("no fault", "kill"),
    seeds: Sequence[int] = (0, 1, 2),
) -> list[Trial]:
    """Return the trials of the toy experiment."""
    return [
        trial(strategy, fault, seed) for strategy, fault, seed in product(strategies, faults, seeds)
    ]


def trial(strategy: str, fault: str, seed: int) -> Trial:
    """Return a toy trial; two seeds differ, all others are said to be other ones."""
    record = Record(tuple(toy_events(strategy, fault, seed % 2)))
    found = outcome(record, load_prices())
    return record, replace(found, identity=replace(found.identity, seed=seed))


def labelled(trial: Trial, labels: dict[str, str], seed: int, final: float) -> Trial:
    """Return a trial said to be of these labels, with another accuracy in the end."""
    record, found = trial
    identity = replace(found.identity, labels=labels, seed=seed)
    accuracy = replace(found.accuracy, final=final)
    return record, replace(found, identity=identity, accuracy=accuracy)


def subject(**chosen: Sequence[Any]) -> Subject:
    """Return the subject that the toy experiment is."""
    return Subject.of(trials(**chosen))


def segments(axes: Axes) -> list[tuple[float, float]]:
    """Return from where to where each drawn segment goes, of lines in the axes' own units."""
    found = []
    for line in axes.get_lines():
        if line.get_transform() != axes.transData or line.get_linestyle() in ("None", ""):
            continue
        x, y = (np.asarray(values, float) for values in line.get_data())
        for i in range(len(x) - 1):
            if not np.isnan([y[i], y[i + 1]]).any() and x[i] != x[i + 1]:
                found.append((float(x[i]), float(x[i + 1])))
    return found
