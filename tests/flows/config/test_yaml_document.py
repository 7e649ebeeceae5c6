"""Reading YAML and `--set`: what is refused, and where messages say it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps.errors import ConfigurationError
from flows.config.yaml_document import (
    as_written,
    parse_document,
    parse_override,
    parse_overrides,
    place_of,
    read_document,
    set_key,
)


def write(folder: Path, text: str) -> Path:
    path = folder / "some.yaml"
    path.write_text(text)
    return path


def test_document_knows_the_line_of_every_key(tmp_path: Path) -> None:
    document = read_document(write(tmp_path, "a: 1\nb:\n  c: 2\n  d: [{e: 3},\n      {e: 4}]\n"))
    assert document.data == {"a": 1, "b": {"c": 2, "d": [{"e": 3}, {"e": 4}]}}
    assert document.place("b.c").endswith("some.yaml, line 3")
    assert document.place("b.d.1.e").endswith("line 5")
    assert document.place("b.unknown.key").endswith("line 2")
    assert document.place("nowhere").endswith("some.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "line 3: malformed YAML"),
        ("a: 1\n\tb: 2\n", "line 2: malformed YAML"),
        ("a: 1\nb: {c: 1, c: 2}\n", "line 2: malformed YAML: the key 'c' is given twice"),
        ("a: 1\na: 1\n", "line 2: malformed YAML: the key 'a' is given twice"),
        ("a: !!python/object:os.system x\n", "line 1: malformed YAML"),
        ("a: &x [*x]\nb: \x07\n", "malformed YAML"),
        ("a: 1\n---\nb: 2\n", "malformed YAML"),
        ("", "the file is empty"),
        ("- 1\n- 2\n", "expected keys such as 'experiment: demo', got a list"),
        ("just words\n", "got 'just words'"),
    ],
)
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_document(write(tmp_path, text))
    assert message in str(caught.value)
    assert "some.yaml" in str(caught.value)


def test_of_several_overrides_the_one_that_counts_is_named(tmp_path: Path) -> None:
    document = read_document(write(tmp_path, "a: {b: 1}\n"))
    overrides = parse_overrides(["a.b=2", "a.c=3", "a={b: 4}", "other=5"])
    assert place_of("a.b", document, overrides).startswith("--set a={b: 4}: a.b")
    assert place_of("a.b", document, overrides[:2]).startswith("--set a.b=2: a.b")
    assert place_of("a.b", document, overrides[3:]).endswith("some.yaml, line 1: a.b")


def test_a_section_of_the_file_is_named_with_what_is_set_in_it(tmp_path: Path) -> None:
    document = read_document(write(tmp_path, "a: {b: 1}\nc: 2\n"))
    overrides = parse_overrides(["a.b=2", "c=3"])
    assert place_of("a", document, overrides).endswith("some.yaml, line 1, with --set a.b=2: a")
    assert place_of("a", document, overrides[1:]).endswith("some.yaml, line 1: a")


def test_a_value_is_placed_where_it_is_written(tmp_path: Path) -> None:
    document = read_document(write(tmp_path, "a:\n  b: 1\n  c: 2\n"))
    overrides = parse_overrides(["a.b=2"])
    assert place_of("a", document, overrides, at="a.b").startswith("--set a.b=2: a")
    assert place_of("a", document, overrides, at="a.c").endswith("some.yaml, line 3: a")


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_document(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ConfigurationError, match=r"binary\.yaml: cannot be read"):
        read_document(tmp_path / "binary.yaml")


def test_a_merge_key_may_be_overridden(tmp_path: Path) -> None:
    path = write(tmp_path, "base: &base {a: 1, b: 2}\nuse: {<<: *base, b: 3}\n")
    assert read_document(path).data["use"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("training.updates=400", "training.updates", 400),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate", 0.001),
        ("recovery=none", "recovery", "none"),
        ("recovery={preset: chain}", "recovery", {"preset": "chain"}),
        ("dataset.folder=a=b", "dataset.folder", "a=b"),
        ("dataset.folder=", "dataset.folder", None),
        ("seeds=[0, 1]", "seeds", [0, 1]),
    ],
)
def test_override_is_read_as_yaml(text: str, key: str, value: object) -> None:
    override = parse_override(text)
    assert (override.key, override.value) == (key, value)


@pytest.mark.parametrize("text", ["training.updates", "=4", "a..b=1", ".a=1", "a.=1"])
def test_malformed_override_shows_the_form(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected key=value, such as"):
        parse_override(text)


def test_override_with_malformed_value_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"--set a=\[1, line 1: malformed YAML"):
        parse_override("a=[1")


def test_set_key_copies_what_it_changes() -> None:
    before = {"a": {"b": 1, "c": 2}, "d": [{"e": 1}, {"e": 2}]}
    assert set_key(before, "a.b", 5)["a"] == {"b": 5, "c": 2}
    assert set_key(before, "d.1.e", 5)["d"] == [{"e": 1}, {"e": 5}]
    assert set_key(before, "x.y", 5)["x"] == {"y": 5}
    assert set_key(before, "d.*.f", 5)["d"] == [{**entry, "f": 5} for entry in before["d"]]
    assert set_key({"d": []}, "d.*.f", 5) == {"d": []}
    assert before == {"a": {"b": 1, "c": 2}, "d": [{"e": 1}, {"e": 2}]}


def test_set_key_opens_a_preset_and_keeps_an_axis_together() -> None:
    assert set_key({"recovery": "chain"}, "recovery.outage.kind", "continue") == {
        "recovery": {"preset": "chain", "outage": {"kind": "continue"}}
    }
    assert set_key({"consistency": "ssp"}, "consistency.tau", 4) == {
        "consistency": {"kind": "ssp", "tau": 4}
    }
    assert set_key({}, "axes.server.shards", [1, 2]) == {"axes": {"server.shards": [1, 2]}}


@pytest.mark.parametrize("key", ["a.b", "d.2", "d.first", "d.0.x"])
def test_set_key_refuses_what_is_not_there(key: str) -> None:
    with pytest.raises(ConfigurationError):
        set_key({"a": 1, "d": [1]}, key, 5)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x85", "\u2028"])
def test_what_the_command_line_changes_is_a_comment_in_every_line(end: str) -> None:
    document = parse_document(b"a: 1  # why\n", "x.yaml")
    text = as_written(document, ["a=2", f"b={{c: 3,{end}d: 4}}"])
    assert text.startswith("# changed by --set a=2\n# changed by --set 'b={c: 3,\n# d: 4}'\n")
    assert text.endswith(document.text)
    assert parse_document(text.encode(), "x.yaml").data == {"a": 1}
    assert as_written(document, []) == document.text
