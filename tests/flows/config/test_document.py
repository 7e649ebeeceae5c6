"""Reading YAML and `--set`: what is refused, and where messages say it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps.errors import ConfigurationError
from flows.config.document import (
    as_written,
    parse_document,
    parse_override,
    place_of,
    read_document,
)


def write(folder: Path, text: str) -> Path:
    path = folder / "some.yaml"
    path.write_text(text)
    return path


def test_document_knows_the_line_of_every_key(tmp_path: Path) -> None:
    document = read_document(write(tmp_path, "a: 1\nb:\n  c: 2\n  d: [{e: 3},\n      {e: 4}]\n"))
    assert document.data == {"a": 1, "b": {"c": 2, "d": [{"e": 3}, {"e": 4}]}}
    assert place_of("b.c", document).endswith("some.yaml, line 3: b.c")
    assert place_of("b.d.1.e", document).endswith("line 5: b.d.1.e")
    assert place_of("b.unknown.key", document).endswith("line 2: b.unknown.key")
    assert place_of("nowhere", document).endswith("some.yaml: nowhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "line 3: malformed YAML"),
        ("a: 1\nb: {c: 1, c: 2}\n", "line 2: malformed YAML: the key 'c' is given twice"),
        ("a: !!python/object:os.system x\n", "line 1: malformed YAML"),
        ("", "expected keys such as 'experiment: demo', got nothing"),
    ],
)
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_document(write(tmp_path, text))
    assert message in str(caught.value)
    assert "some.yaml" in str(caught.value)


def test_of_several_overrides_the_one_that_counts_is_named(tmp_path: Path) -> None:
    document = read_document(write(tmp_path, "a: {b: 1}\n"))
    overrides = [parse_override(each) for each in ("a.b=2", "a.c=3", "a={b: 4}", "other=5")]
    assert place_of("a.b", document, overrides).startswith("--set a={b: 4}: a.b")
    assert place_of("a.b", document, overrides[:2]).startswith("--set a.b=2: a.b")
    assert place_of("a.b", document, overrides[3:]).endswith("some.yaml, line 1: a.b")


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_document(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ConfigurationError, match=r"binary\.yaml cannot be read"):
        read_document(tmp_path / "binary.yaml")


def test_a_merge_key_may_be_overridden(tmp_path: Path) -> None:
    path = write(tmp_path, "base: &base {a: 1, b: 2}\nuse: {<<: *base, b: 3}\n")
    assert read_document(path).data["use"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("training.updates=400", "training.updates", 400),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate", 0.001),
        ("dataset.folder=a=b", "dataset.folder", "a=b"),
        ("dataset.folder=", "dataset.folder", None),
    ],
)
def test_override_is_read_as_yaml(text: str, key: str, value: object) -> None:
    override = parse_override(text)
    assert (override.key, override.value) == (key, value)


def test_what_the_command_line_changes_is_a_comment() -> None:
    document = parse_document("a: 1  # why\n", "x.yaml")
    text = as_written(document, ["a=2", "b={c: 3,\nd: 4}"])
    assert text.startswith("# changed by --set a=2\n# changed by --set 'b={c: 3,\n# d: 4}'\n")
    assert parse_document(text, "x.yaml").data == {"a": 1}
    assert as_written(document, []) == document.text
