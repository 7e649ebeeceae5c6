"""What the figures about the effect of faults mean: differences to a control without them."""

from __future__ import annotations

from flows.metrics.metric import Better, Metric, Unit

CONTROL = (
    "the trial of the same experiment with the same seed and settings, but for its fault plan, "
    "which is empty"
)
LEVEL = (
    "During an outage the curve is level; if accuracy is worse after it, it drops where the outage "
    "began. Straight lines between evaluations would show a smaller effect"
)
_SPANS = {
    "time": (
        "same time",
        "at the same times",
        "seconds since the training began, from the first fault to the end of the shorter training",
    ),
    "gradients": (
        "same gradients",
        "after as many gradients",
        "gradients pushed (lost ones count, for they were work), from the first fault to where the "
        "first of the two trainings ends",
    ),
    "money": (
        "same money",
        "for as much money",
        "USD spent so far (`cost_usd`, if the training had ended then), from the first fault to "
        "where the first of the two trainings ends. It assumes that nodes cost by the second on "
        "demand while they live, so that a lost node costs nothing until another takes its place, "
        "that bytes sent cost when they are sent, and that bytes stored cost evenly",
    ),
}


def _effects() -> tuple[Metric, ...]:
    found = []
    for over, (label, how, span) in _SPANS.items():
        found += [
            Metric(
                f"effect_{over}_mean",
                f"effect, {label}",
                "points",
                f"Accuracy minus that of the control {how}: mean over the span. That is {span}. "
                f"{LEVEL}, of no recovery little more than half. Control: {CONTROL}.",
                f"effect/{over}_mean",
                better="higher",
                signed=True,
                of_score=True,
                of_faults=True,
            ),
            Metric(
                f"effect_{over}_end",
                f"effect at the end, {label}",
                "points",
                f"Accuracy minus that of the control {how}, at the end of the span.",
                f"effect/{over}_end",
                better="higher",
                signed=True,
                of_score=True,
                of_faults=True,
            ),
        ]
    return tuple(found)


def _other(
    key: str,
    label: str,
    unit: Unit,
    definition: str,
    better: Better | None = None,
    of_score: bool = False,
) -> Metric:
    name = f"effect/{key.removeprefix('effect_')}"
    return Metric(key, label, unit, definition, name, better, True, of_score, of_faults=True)


EFFECTS = (
    Metric(
        "control",
        "control",
        "",
        f"Trial that the effect of the faults is told against: {CONTROL}. Empty where there is no "
        "such trial, or one of the two is not valid or was resumed: then there is no effect "
        "either.",
    ),
    *_effects(),
    _other(
        "effect_time_area",
        "area between the curves",
        "point-seconds",
        "Area between the curve of accuracy over time and that of the control, over the same span: "
        "the mean effect at the same times, times the length of the span.",
        "higher",
        of_score=True,
    ),
    Metric(
        "effect_time_span",
        "span of the effect",
        "s",
        "Length of the span of time over which the effect is told.",
        "effect/time_span",
        of_faults=True,
    ),
    _other(
        "gradients_deficit",
        "gradients not computed",
        "count",
        "Gradients that the control pushed in that span of time, minus those that the trial did.",
        "lower",
    ),
    _other(
        "effect_training_seconds",
        "effect on the training's length",
        "s",
        "Time of the training minus that of the control.",
        "lower",
    ),
    _other(
        "effect_cost_usd",
        "effect on money",
        "USD",
        "Money on demand minus that of the control.",
        "lower",
    ),
)
