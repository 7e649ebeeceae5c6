"""The problems on real clusters: targets are met, also after SIGKILL of a server, or it is said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from distributed import Client
from scipy.sparse import vstack
from sklearn.datasets import dump_svmlight_file, load_digits

from dps.cluster.backends.local import LocalCluster
from dps.errors import ConfigurationError
from examples import l1_logistic, lda, rica
from examples.__main__ import PAGE, main, solve_each, told
from examples.outcome import Outcome, Task
from examples.sparse_data import Synthetic
from tests.support.training import nodes

SECONDS = 30.0
PRELOAD = (
    "dps.cluster.driver.parameter_server",
    "examples.l1_logistic",
    "examples.lda",
)
SYNTHETIC = Synthetic(examples=2000, features=200, seed=3, nonzeros=8, piece=250)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two servers with a replica each, and two workers."""
    with LocalCluster(nodes(replicas=1), PRELOAD) as started:
        yield started


@pytest.fixture
def client(cluster: LocalCluster) -> Client:
    return cluster.client


@pytest.fixture
def svmlight(tmp_path: Path) -> Path:
    z = vstack(list(SYNTHETIC.share(0, 1)))  # examples times labels: any labels will do
    labels = np.where(np.arange(2000) % 3, 1.0, -1.0)
    path = tmp_path / "synthetic.svm"
    x = z.multiply(labels[:, None]).tocsr()
    dump_svmlight_file(x, labels, str(path), zero_based=False)
    return path


@pytest.mark.slow
@pytest.mark.cluster
def test_logistic_regression_of_a_users_file_meets_its_target(
    client: Client, svmlight: Path
) -> None:
    outcome = l1_logistic.solve(client, Task(data=svmlight))
    assert outcome.met, told("l1_logistic", outcome, 0)
    assert outcome.excess >= -1e-6  # nobody gets below the optimum
    assert "2,000 examples × 201 features" in outcome.notes[0]


@pytest.mark.slow
@pytest.mark.cluster
def test_rica_of_a_users_images_meets_its_target(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "digits.npz", x=(15 * load_digits().images).astype(np.uint8))
    monkeypatch.setattr(rica, "SIZES", {"small": (1000, 5, 24)})
    monkeypatch.setattr(rica, "PLAN", ((1600, 100), (800, 500)))
    outcome = rica.solve(client, Task(data=tmp_path / "digits.npz", output=tmp_path))
    assert outcome.met, told("rica", outcome, 0)
    assert [path.name for path in outcome.files] == ["rica.png"]
    assert (tmp_path / "rica.png").stat().st_size > 100


def documents(path: Path, number: int) -> Path:
    """A file of documents with 40 words each, of 20 topics.

    The topics overlap: between some that do not, a sampler would hardly ever find a way.
    """
    rng = np.random.default_rng(0)
    topics = rng.dirichlet(np.full(100, 0.1), 20)
    counts = [rng.multinomial(40, rng.dirichlet(np.full(20, 0.1)) @ topics) for _ in range(number)]
    entries = [
        f"{d} {w} {bag[w - 1]}\n"
        for d, bag in enumerate(counts, 1)
        for w in 1 + np.flatnonzero(bag)
    ]
    path.write_text(f"{number}\n100\n{len(entries)}\n{''.join(entries)}")
    return path


@pytest.mark.slow
@pytest.mark.cluster
def test_topics_of_a_users_file_meet_their_target(client: Client, tmp_path: Path) -> None:
    path = documents(tmp_path / "docword.planted.txt", 300)
    outcome = lda.solve(client, Task(data=path, output=tmp_path))
    assert outcome.met, told("lda", outcome, 0)
    assert f"the server counts {240 * 40:,} words at the end" in outcome.notes
    (listed,) = outcome.files
    assert len(listed.read_text().splitlines()) == lda.TOPICS


# -- the command -----------------------------------------------------------------------------------


MET = Outcome("objective", 1.005, 1.0, "the reference", 0.01, ("a note",), (Path("new/a.png"),))


def test_what_is_solved_is_on_the_page_though_the_next_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def solver(name: str) -> Outcome:
        if name == "rica":
            raise ConfigurationError("no images")
        return MET

    with pytest.raises(ConfigurationError, match="no images"):
        solve_each(["lda", "rica"], tmp_path / "new" / "folder", solver)
    assert "lda: topics" in capsys.readouterr().out
    assert "## lda" in (tmp_path / "new" / "folder" / PAGE).read_text()


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["examples", *arguments])
    with pytest.raises(SystemExit) as code:
        main()
    return code.value.code


@pytest.mark.slow
@pytest.mark.cluster
def test_a_missed_target_ends_with_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(lda, "TOLERANCE", -0.99)
    path = documents(tmp_path / "docword.planted.txt", 60)
    assert ended(monkeypatch, "lda", "--data", str(path), "--output", str(tmp_path / "out")) == 1
    assert "MISSED" in capsys.readouterr().out
    assert "MISSED" in (tmp_path / "out" / PAGE).read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["l2"], "example 'l2' is unknown; there are: l1_logistic, rica, lda, factors and all"),
        (["all", "--data", "a.svm"], "--data: name one example"),
        (["rica", "--data", "nowhere"], "--data nowhere: expected a file"),
        (["rica", "--size", "huge"], "--size huge: expected small or large"),
    ],
)
def test_bad_input_is_told(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
