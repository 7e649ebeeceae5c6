"""What the figures about the model mean: accuracy and loss, and both around a fault.

Those around a fault describe what was seen. What a fault does is in `flows.metrics.effects`.
"""

from __future__ import annotations

from flows.metrics.metric import Metric

ACCURACY = (
    Metric(
        "accuracy_final",
        "final accuracy",
        "%",
        "Test accuracy: mean of the last 3 evaluations.",
        "final/accuracy",
        better="higher",
        of_score=True,
        whole=False,
    ),
    Metric(
        "accuracy_best",
        "best",
        "%",
        "Best evaluation of the trial.",
        "final/best_accuracy",
        better="higher",
        of_score=True,
    ),
    Metric(
        "accuracy_before",
        "before fault (description)",
        "%",
        "Description, not an effect: last evaluation whose snapshot was read before the fault: "
        "the first by which a shard was not served for a time, else the first of all.",
        "fault/accuracy_before",
        of_score=True,
        of_faults=True,
    ),
    Metric(
        "accuracy_before_mean",
        "before fault, mean of 3 (description)",
        "%",
        "Description, not an effect: mean of the last 3 evaluations before the fault.",
        "fault/accuracy_before_mean",
        of_score=True,
        of_faults=True,
    ),
    Metric(
        "accuracy_after",
        "after fault (description)",
        "%",
        "Description, not an effect: first evaluation after the shard served again; empty when no "
        "fault took one down.",
        "fault/accuracy_after",
        better="higher",
        of_score=True,
        of_faults=True,
    ),
    Metric(
        "accuracy_drop",
        "before minus after (description)",
        "points",
        "Description, not an effect: accuracy before the fault minus accuracy after it; negative "
        "when that was higher. What was learnt meanwhile is in it, over spans that differ between "
        "strategies, and it does not count what would have been learnt without the fault.",
        "fault/accuracy_drop",
        better="lower",
        signed=True,
        of_score=True,
        of_faults=True,
    ),
    Metric(
        "accuracy_lowest_after",
        "worst after fault (description)",
        "%",
        "Description, not an effect: worst evaluation after the shard served again.",
        "fault/accuracy_lowest_after",
        better="higher",
        of_score=True,
        of_faults=True,
    ),
    Metric(
        "regain_seconds",
        "regained after (description)",
        "s",
        "Description, not an effect: from the fault to the first evaluation, after the shard "
        "served again, that is as good as the last before the fault. As coarse as the interval "
        "between evaluations; empty when there is none.",
        "fault/regain_seconds",
        better="lower",
        of_faults=True,
    ),
    Metric(
        "accuracy_area_time",
        "mean over time",
        "%",
        "Area under the curve of accuracy against time, divided by the time of the training: mean "
        "accuracy while training, straight between evaluations.",
        "final/accuracy_area_time",
        better="higher",
        of_score=True,
    ),
    Metric(
        "accuracy_area_gradients",
        "mean over gradients",
        "%",
        "Area under the curve of accuracy against gradients pushed, divided by their number: mean "
        "accuracy per gradient, straight between evaluations. Gradients that were lost count.",
        "final/accuracy_area_gradients",
        better="higher",
        of_score=True,
    ),
    Metric(
        "target_accuracy",
        "target",
        "%",
        "The accuracy that `evaluation.target` names.",
        "target/accuracy",
        of_score=True,
        whole=False,
    ),
    Metric(
        "target_seconds",
        "time to target",
        "s",
        "From the start of the training to the first evaluation that is as good as the target; "
        "empty when never reached, and without a target.",
        "target/seconds",
        better="lower",
    ),
    Metric(
        "target_gradients",
        "gradients to target",
        "count",
        "Gradients pushed until the first evaluation that is as good as the target.",
        "target/gradients",
        better="lower",
    ),
    Metric(
        "target_usd",
        "money to target",
        "USD",
        "Money spent until the first evaluation that is as good as the target, on demand, as if "
        "the training had ended then.",
        "target/usd",
        better="lower",
    ),
    Metric(
        "loss_final",
        "final loss",
        "",
        "Test loss: mean of the last 3 evaluations; empty where one is not finite.",
        "final/loss",
        better="lower",
        whole=False,
    ),
    Metric(
        "rmse_final",
        "final RMSE",
        "",
        "Root of the mean squared error on the test part, in the units of the target in its file: "
        "that of the final R² where this is the score, and empty then if it is 0. Empty too with "
        "the loss as the score, and where targets are classes.",
        "final/rmse",
        better="lower",
        whole=False,
    ),
    Metric(
        "loss_lowest",
        "lowest loss",
        "",
        "Lowest test loss of the trial.",
        "final/lowest_loss",
        better="lower",
    ),
    Metric(
        "objective_final",
        "final objective",
        "",
        "Mean loss over all training data, with the penalty of the update rule: mean of the last 3 "
        "evaluations; empty where one is not finite, and without `evaluation.objective`.",
        "final/objective",
        better="lower",
        whole=False,
    ),
    Metric(
        "objective_lowest",
        "lowest objective",
        "",
        "Lowest objective of the trial.",
        "final/lowest_objective",
        better="lower",
    ),
    Metric(
        "objective_excess",
        "excess over the reference",
        "%",
        "Final objective minus `evaluation.objective.reference`, in per cent of that.",
        "final/objective_excess",
        better="lower",
        signed=True,
        whole=False,
    ),
    Metric(
        "objective_target_seconds",
        "time to the objective",
        "s",
        "From the start of the training to the first evaluation whose objective exceeds the "
        "reference by `evaluation.objective.target` at most; empty when never reached.",
        "target/objective_seconds",
        better="lower",
    ),
    Metric(
        "objective_target_gradients",
        "gradients to the objective",
        "count",
        "Gradients pushed until the first evaluation whose objective exceeds the reference by "
        "`evaluation.objective.target` at most.",
        "target/objective_gradients",
        better="lower",
    ),
    Metric(
        "stationarity_final",
        "distance from stationarity",
        "",
        "Norm of the proximal gradient mapping over all training data, which is 0 where the "
        "weights are stationary and nowhere else: mean of the last 3 evaluations; empty without "
        "`evaluation.objective`.",
        "final/stationarity",
        better="lower",
        whole=False,
    ),
    Metric(
        "stationarity_lowest",
        "least distance from stationarity",
        "",
        "Lowest norm of the proximal gradient mapping of the trial.",
        "final/lowest_stationarity",
        better="lower",
    ),
    Metric("evaluations", "evaluations", "count", "Snapshots scored.", "final/evaluations"),
    Metric(
        "evaluations_missed",
        "evaluations missed",
        "count",
        "Snapshots that could not be read because a shard was down.",
        "final/evaluations_missed",
        better="lower",
    ),
)
