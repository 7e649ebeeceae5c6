"""Latent Dirichlet allocation by distributed collapsed Gibbs sampling.

Documents are divided over workers, which draw topics for their tokens (`examples.gibbs`). The
server holds the number of tokens of each word with each topic. A worker processes its documents
once with the counts that it has read, pushes their changes, and reads the changes of the others
(approximate distributed LDA: Newman et al. 2009). Changes of counts commute, so the order of pushes
does not matter, but each must be applied exactly once. It is the third problem of Li et al. (OSDI
2014, section 5.2).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from dps import SGD, SSP, ConfigurationError, DpsError, ParameterServer, Worker
from examples.corpus import read_bag_of_words, write_corpus
from examples.gibbs import Priors, Sampler, perplexity
from examples.outcome import PATIENT, Outcome, Task

if TYPE_CHECKING:
    from distributed import Client

Array = npt.NDArray[np.float64]

TOLERANCE = 0.02
TOPICS = 20
PRIORS = Priors(topics=1 / TOPICS, words=1 / TOPICS)  # scikit-learn's defaults
SWEEPS, AVERAGED = 150, 50  # passes over all documents; the last ones are what topics are made of
BOUND = 1
HELD_OUT = 5  # every fifth document
MIN_TOKENS = 2  # in a document, for perplexity: half of them tell its topics, half are asked for
SIZES = {"small": 1000, "large": 5000}  # documents
SHOWN = 8  # words of a topic


def train(path: Path, seed: int, worker: Worker) -> Array:
    """Draw topics for this worker's documents; return the mean counts of the last sweeps."""
    counts = split(read_bag_of_words(path).counts)[0][worker.index :: worker.workers]
    rng = np.random.default_rng([seed, worker.index])
    sampler = Sampler(counts, TOPICS, PRIORS, rng)
    known = worker.push_pull({"counts": -sampler.word_topics()})["counts"]
    mean = np.zeros_like(known)
    for sweep in range(SWEEPS):
        drawn = known.copy()
        sampler.sweep(drawn)
        # SGD(1.0) subtracts what is pushed.
        known = worker.push_pull({"counts": known - drawn})["counts"]
        if sweep >= SWEEPS - AVERAGED:
            mean += known / AVERAGED
    if worker.dropped:
        raise DpsError(f"{worker.name}: {worker.dropped} updates were dropped, counts lack them")
    return mean


def split(counts: csr_array) -> tuple[csr_array, csr_array]:
    """Divide documents into training and held-out documents."""
    held_out = np.arange(counts.shape[0]) % HELD_OUT == HELD_OUT - 1
    return counts[~held_out], counts[held_out]


def solve(client: Client, task: Task) -> Outcome:
    """Train, and compare with scikit-learn on the held-out documents."""
    path = task.data or write_corpus(task.output, SIZES[task.size], task.seed)
    corpus = read_bag_of_words(path)
    learn, held_out = split(corpus.counts)
    if not learn.sum() or held_out.sum(axis=1).max(initial=0) < MIN_TOKENS:
        raise ConfigurationError(
            f"{path}: every {HELD_OUT}th document is held out, and one of these must have "
            f"{MIN_TOKENS} words at least, and one of the others any; found "
            f"{learn.shape[0]} documents of {int(learn.sum())} words to learn from, and "
            f"{held_out.shape[0]} of {int(held_out.sum())} words held out"
        )
    with ParameterServer(
        client,
        {"counts": np.zeros((len(corpus.words), TOPICS))},
        shards=task.shards,
        optimizer=SGD(1.0),
        consistency=SSP(BOUND),
        recovery=task.recovery,
        timings=PATIENT,
    ) as ps:
        means = client.gather(ps.run(partial(train, path.absolute(), task.seed), task.workers))
        tokens = ps.pull()["counts"].sum()
    found = as_topics(means[0].T + PRIORS.words)
    reached, reference = (
        perplexity(topics, held_out, PRIORS.topics, np.random.default_rng(task.seed))
        for topics in (found, scikit_learn(learn, task.seed))
    )
    listed = task.output / "lda-topics.txt"
    best = [[corpus.words[w] for w in np.argsort(-topic)[:SHOWN]] for topic in found]
    listed.parent.mkdir(parents=True, exist_ok=True)
    listed.write_text("".join(f"{n:2} {' '.join(words)}\n" for n, words in enumerate(best, 1)))
    notes = (
        f"{learn.shape[0]:,} documents of {int(learn.sum()):,} words to learn from, "
        f"{held_out.shape[0]:,} held out; {len(corpus.words):,} different words, {TOPICS} topics",
        f"the server counts {tokens:,.0f} words at the end",
        *(f"topic {n}: {' '.join(words)}" for n, words in enumerate(best[:3], 1)),
    )
    named = "scikit-learn's LatentDirichletAllocation"
    return Outcome("held-out perplexity", reached, reference, named, TOLERANCE, notes, (listed,))


def as_topics(counts: Array) -> Array:
    """Return rows of counts as distributions."""
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def scikit_learn(learn: csr_array, seed: int) -> Array:
    """Return the topics of variational Bayes with the same priors, in one process."""
    from sklearn.decomposition import LatentDirichletAllocation

    model = LatentDirichletAllocation(
        TOPICS,
        doc_topic_prior=PRIORS.topics,
        topic_word_prior=PRIORS.words,
        max_iter=SWEEPS // 3,
        random_state=seed,
    )
    return as_topics(model.fit(learn).components_)
