"""What is kept of a trial in its record and beside its checkpoints: written, and read back.

What is read may be of another version of dps, or of a machine that had more than this one: torch,
or a module of the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from dps.errors import ConfigurationError
from dps.events.reading import quoted
from flows.config.base import OF_RECORD
from flows.config.errors import key_of, sentence
from flows.config.experiment import TrialConfig
from flows.config.trials import Trial
from flows.records.record import is_folder_name


def settings(trial: Trial, circumstances: Mapping[str, int]) -> dict[str, Any]:
    """Everything that the trial depends on, and its circumstances, for its record."""
    return {
        "trial": trial.name,
        "experiment": trial.experiment,
        "labels": trial.labels,
        "seed": trial.seed,
        "digest": trial.digest,
        "config": trial.config.model_dump(mode="json"),
        "circumstances": dict(circumstances),
    }


def trial_from(kept: Mapping[str, Any], place: str) -> Trial:
    """Return the trial whose `settings` were kept in `place`.

    Raises
    ------
    ConfigurationError
        They are not of a trial, or of one that cannot run here.
    """
    try:
        name, experiment, labels = kept["trial"], kept["experiment"], kept["labels"]
        seed, written, digest = kept["seed"], kept["config"], kept["digest"]
    except KeyError as error:
        raise ConfigurationError(
            f"{place} is not of a trial of this version of dps: {error} is missing; run the trial "
            "again with dps run"
        ) from error
    for key, value in (("trial", name), ("experiment", experiment)):
        # Folders are named after them.
        if not is_folder_name(value):
            raise _unfit(place, key, value, "the name of a folder")
    if not isinstance(labels, dict) or not all(isinstance(x, str) for x in labels.values()):
        raise _unfit(place, "labels", labels, "texts by axis")
    if type(seed) is not int or seed < 0:
        raise _unfit(place, "seed", seed, "0 or more")
    if not isinstance(digest, str):
        raise _unfit(place, "digest", digest, "a text")
    return Trial(name, experiment, labels, seed, _config_from(written, place), digest)


def _unfit(place: str, key: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"{place} is damaged: {key} is {quoted(value)}, expected {wanted}; run the trial again "
        "with dps run"
    )


def _config_from(written: Any, place: str) -> TrialConfig:
    try:
        return TrialConfig.model_validate(written, context=OF_RECORD)
    except ValidationError as error:
        found = error.errors(include_url=False)
        lines = [f"{place}: config.{key_of(e, written)}: {sentence(e)}" for e in found]
        advice = (
            "this trial cannot run here; use the version of dps that it is of and install what it "
            "needs, or run it again with dps run"
        )
        raise ConfigurationError("\n".join([*lines, advice])) from error
