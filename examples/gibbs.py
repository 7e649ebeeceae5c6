"""Collapsed Gibbs sampling for latent Dirichlet allocation, on whole arrays of tokens.

Each token has a topic. The topic of a token in document d of word w is drawn from its distribution
given the topics of all other tokens, p(k) ∝ (n_dk + α)·(n_wk + β) / (n_k + V·β), with the counts
without the token itself (Griffiths and Steyvers 2004). Several documents are sampled at once: the
i-th tokens of all of them are drawn together, from word counts that lack the draws of that step.
With one document at a time it is the plain sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

AT_ONCE = 128
FOLD_IN_STEPS = 100


@dataclass(frozen=True, slots=True)
class Priors:
    """The parameters of the Dirichlet distributions: α of topics, and β of words."""

    topics: float
    words: float


@dataclass(eq=False)
class _Batch:
    """Documents that are sampled at once, the longest first.

    `words` and `topics` have an array for each position, with the documents that have one.
    """

    words: list[Integers]
    topics: list[Integers]
    in_document: Array  # n_dk


class Sampler:
    """The tokens of some documents and their topics, which each sweep redraws.

    Parameters
    ----------
    counts
        How often each word is in each document: documents × words.
    topics
        K.
    priors
        α and β.
    rng
        Random generator of all draws.
    at_once
        Number of documents to sample at once.
    """

    def __init__(
        self,
        counts: csr_array,
        topics: int,
        priors: Priors,
        rng: np.random.Generator,
        at_once: int = AT_ONCE,
    ) -> None:
        self._size = (counts.shape[1], topics)
        self._priors = priors
        self._rng = rng
        documents = [tokens for tokens in tokens_of(counts, rng) if len(tokens)]
        self._batches = [
            self._batch(documents[start : start + at_once])
            for start in range(0, len(documents), at_once)
        ]

    def _batch(self, documents: list[Integers]) -> _Batch:
        documents = sorted(documents, key=len, reverse=True)
        lengths = np.array([len(tokens) for tokens in documents])
        words = [
            np.array([tokens[i] for tokens in documents[: np.count_nonzero(lengths > i)]])
            for i in range(lengths[0])
        ]
        topics = [self._rng.integers(0, self._size[1], len(tokens)) for tokens in words]
        in_document = np.zeros((len(documents), self._size[1]))
        for drawn in topics:
            in_document[np.arange(len(drawn)), drawn] += 1
        return _Batch(words, topics, in_document)

    def word_topics(self) -> Array:
        """Return the number of tokens of each word with each topic: words × topics."""
        flat = np.zeros(self._size[0] * self._size[1])
        for batch in self._batches:
            for words, topics in zip(batch.words, batch.topics, strict=True):
                np.add.at(flat, words * self._size[1] + topics, 1.0)
        return flat.reshape(self._size)

    def sweep(self, word_topics: Array) -> None:
        """Draw the topic of every token once.

        Parameters
        ----------
        word_topics
            n_wk over all documents, these included: words × topics. It is updated.
        """
        flat, totals = word_topics.reshape(-1), word_topics.sum(axis=0)
        for batch in self._batches:
            for i, (words, old) in enumerate(zip(batch.words, batch.topics, strict=True)):
                rows, cells = np.arange(len(words)), words * self._size[1]
                batch.in_document[rows, old] -= 1
                np.subtract.at(flat, cells + old, 1.0)
                totals -= np.bincount(old, minlength=len(totals))
                new = self._draw(batch.in_document[: len(words)], word_topics[words], totals)
                batch.in_document[rows, new] += 1
                np.add.at(flat, cells + new, 1.0)
                totals += np.bincount(new, minlength=len(totals))
                batch.topics[i] = new

    def _draw(self, in_document: Array, of_words: Array, totals: Array) -> Integers:
        """Draw a topic for each row."""
        chances = in_document + self._priors.topics
        chances *= of_words + self._priors.words
        chances /= totals + self._size[0] * self._priors.words
        np.cumsum(chances, axis=1, out=chances)
        at = self._rng.random(len(chances)) * chances[:, -1]
        return np.asarray((chances < at[:, None]).sum(axis=1), np.int64)


def tokens_of(counts: csr_array, rng: np.random.Generator) -> list[Integers]:
    """Return the tokens of each document, in random order."""
    return [
        rng.permutation(np.repeat(counts.indices[begin:end], counts.data[begin:end])).astype(
            np.int64
        )
        for begin, end in zip(counts.indptr[:-1], counts.indptr[1:], strict=True)
    ]


def perplexity(topics: Array, counts: csr_array, prior: float, rng: np.random.Generator) -> float:
    """Return the perplexity of held-out documents: lower is better.

    A random half of each document's tokens determines its topics (100 steps of expectation
    maximisation with fixed topics and a Dirichlet prior). The perplexity, exp(−mean log p(word)),
    is that of the other half. The estimator accepts topics of any origin (document completion:
    Wallach et al. 2009, section 5).

    Parameters
    ----------
    topics
        p(word | topic): topics × words, rows sum to 1.
    counts
        Held-out documents × words.
    prior
        α.
    """
    logs, number = 0.0, 0
    for tokens in tokens_of(counts, rng):
        seen, asked = tokens[::2], tokens[1::2]
        if not len(asked):
            continue
        of_seen = topics[:, seen]
        share = np.full(len(topics), 1 / len(topics))
        for _ in range(FOLD_IN_STEPS):
            belongs = share[:, None] * of_seen
            belongs /= belongs.sum(axis=0)
            share = prior + belongs.sum(axis=1)
            share /= share.sum()
        logs += float(np.log(share @ topics[:, asked]).sum())
        number += len(asked)
    return float(np.exp(-logs / number))
