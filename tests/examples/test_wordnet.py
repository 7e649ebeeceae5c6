"""WordNet's glosses as examples: what is a feature, and what is no file of WordNet's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.wordnet import main
from flows.readers import read_svmlight

LICENCE = "  1 This software and database is being provided to you.\n"
NOUN = '00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 | a thing that exists; "a Thing"\n'
OTHERS = {
    "noun": LICENCE + NOUN,
    "verb": LICENCE + "00001740 29 v 01 breathe 0 000 | draw a breath, or exists\n",
    "adj": "00001740 00 a 01 able 0 000 | having a means\n",
    "adv": "00001740 02 r 01 singly 0 000 | alone\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, text in OTHERS.items():
        (tmp_path / f"data.{part}").write_text(text)
    return tmp_path


def test_an_example_is_a_gloss_and_a_feature_a_word_of_two(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = folder / "wordnet.svm"
    assert main([str(folder), str(target)]) == 0
    assert "4 examples × 2 features, 5 entries" in capsys.readouterr().out
    found = read_svmlight(target)
    x = np.round(found.x.toarray(), 4)
    rows = {(label, tuple(row)) for label, row in zip(found.y, x, strict=True)}
    half = round(2**-0.5, 4)
    # "a" and "exists", in this order; no other word is in two glosses.
    assert rows == {
        (1.0, (half, half)),
        (-1.0, (half, half)),
        (-1.0, (1.0, 0.0)),
        (-1.0, (0.0, 0.0)),
    }
