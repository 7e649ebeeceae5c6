"""Gibbs sampling against the exact posterior, perplexity, and the corpus of docstrings."""

from __future__ import annotations

from itertools import product
from math import lgamma

import numpy as np
import pytest
from scipy.sparse import csr_array

from examples.gibbs import Priors, Sampler, perplexity

TINY = csr_array(np.array([[2, 1, 0], [0, 1, 1]]))
PRIORS = Priors(topics=0.4, words=0.3)


def log_posterior(topics: tuple[int, ...]) -> float:
    """Of the topics of the five tokens of `TINY`, but for a constant (Griffiths and Steyvers)."""
    documents, words = (0, 0, 0, 1, 1), (0, 0, 1, 1, 2)
    in_document, of_word = np.zeros((2, 2)), np.zeros((2, 3))
    for document, word, topic in zip(documents, words, topics, strict=True):
        in_document[document, topic] += 1
        of_word[topic, word] += 1
    result = sum(lgamma(n + PRIORS.topics) for n in in_document.ravel())
    result += sum(lgamma(n + PRIORS.words) for n in of_word.ravel())
    return result - sum(lgamma(n + 3 * PRIORS.words) for n in of_word.sum(axis=1))


def exact_counts() -> np.ndarray:
    """The posterior's probability of each matrix of word counts, by the counts of topic 0."""
    chances = np.zeros((3, 3, 2))
    for topics in product(range(2), repeat=5):
        cell = np.zeros(3, int)
        for word, topic in zip((0, 0, 1, 1, 2), topics, strict=True):
            cell[word] += topic == 0
        chances[tuple(cell)] += np.exp(log_posterior(topics))
    return chances / chances.sum()


@pytest.mark.slow
@pytest.mark.parametrize(("at_once", "tolerance"), [(1, 0.015), (2, 0.06)])
def test_topics_are_drawn_from_the_posterior(at_once: int, tolerance: float) -> None:
    """One document at a time exactly, side by side nearly: here half of all documents at once."""
    sampler = Sampler(TINY, 2, PRIORS, np.random.default_rng(0), at_once)
    word_topics, seen = sampler.word_topics(), np.zeros((3, 3, 2))
    for _ in range(6000):
        sampler.sweep(word_topics)
        seen[tuple(word_topics[:, 0].astype(int))] += 1
    assert np.abs(seen / 6000 - exact_counts()).max() < tolerance


def planted(documents: int, rng: np.random.Generator) -> tuple[csr_array, np.ndarray]:
    """Documents of 40 words, drawn from four topics of five words each."""
    topics = np.kron(np.eye(4), np.full(5, 0.2))
    shares = rng.dirichlet(np.full(4, 0.2), documents)
    return csr_array(np.stack([rng.multinomial(40, s @ topics) for s in shares])), topics


def test_planted_topics_are_found() -> None:
    counts, topics = planted(200, np.random.default_rng(0))
    sampler = Sampler(counts, 4, Priors(0.2, 0.05), np.random.default_rng(1))
    word_topics = sampler.word_topics()
    for _ in range(40):
        sampler.sweep(word_topics)
    np.testing.assert_array_equal(word_topics, sampler.word_topics())
    assert word_topics.sum() == counts.sum()
    found = word_topics / word_topics.sum(axis=0)
    nearest = np.abs(found.T[:, None] - topics[None]).sum(axis=2)
    assert (nearest.min(axis=1) < 0.2).all()
    assert sorted(nearest.argmin(axis=1)) == [0, 1, 2, 3]


def test_perplexity_is_the_number_of_words_to_choose_from() -> None:
    counts, topics = planted(300, np.random.default_rng(2))
    uniform = np.full((4, 20), 1 / 20)
    assert perplexity(uniform, counts, 0.2, np.random.default_rng(0)) == pytest.approx(20)
    true = perplexity(0.999 * topics + 0.001 / 20, counts, 0.2, np.random.default_rng(0))
    assert 5 < true < 12  # a document has one topic of five words, or a few
