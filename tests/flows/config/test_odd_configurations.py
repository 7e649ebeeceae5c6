"""Odd configurations end in a plan, or with exit code 2 and a message of a screen at most."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.odd_configurations import BOMB, MOST_CHARACTERS, MOST_LINES, ended, printable

ROOT = Path(__file__).parents[3]
EACH = 500
MOST_MB = 500
BASE: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 100},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
}
HEADER = "seconds,kind,target,duration\n"


def seed_of_today() -> int:
    """Another seed for each commit and each day; DPS_ODD_SEED repeats one."""
    if given := os.environ.get("DPS_ODD_SEED"):
        return int(given)
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout
    text = f"{commit} {datetime.now(UTC).date()}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", ["shipped", "schema"])
def test_whatever_a_configuration_says_it_is_planned_or_refused(source: str) -> None:
    seed = seed_of_today()
    command = [
        sys.executable,
        "-m",
        "tests.support.odd_configurations",
        source,
        str(seed),
        str(EACH),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    again = f"DPS_ODD_SEED={seed}: {' '.join(command[1:])}\n"
    assert run.returncode == 0, f"{again}{run.stderr[-20_000:]}"
    print(again, run.stdout)
    tried = json.loads(run.stdout)
    assert tried["tried"] >= EACH
    assert tried["plans"] > EACH / 100, "hardly any can be planned: the rest of it is not reached"
    assert tried["refused"] > EACH / 5
    assert tried["peak_mb"] < MOST_MB


# -- one by one ----------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    argv, umask = list(sys.argv), os.umask(0o022)
    os.umask(umask)
    yield tmp_path
    sys.argv[:] = argv
    os.umask(umask)


def refused(*words: str) -> str:
    """Return the message of a command that ended as bad input has to, soon."""
    began = time.process_time()
    code, out, err = ended([*words])
    assert time.process_time() - began < 2
    assert code == 2, err
    assert out == ""
    assert err.count("\n") <= MOST_LINES
    assert len(err) <= MOST_CHARACTERS
    assert printable(err), ascii(err)
    return err


def written(here: Path, text: str) -> str:
    path = here / "odd.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def with_values(here: Path, **values: Any) -> str:
    return written(here, yaml.safe_dump({**BASE, **values}, sort_keys=False, width=10**9))


TEXTS: list[tuple[str, str]] = [
    # What PyYAML's own constructors fail at.
    ("seeds: !!int ''", "line 1: malformed YAML: '' is no whole number"),
    ("a: 1\nseeds: !!float ''", "line 2: malformed YAML: '' is no number"),
    ("seeds: !!bool x", "'x' is no true or false"),
    ("seeds: !!timestamp x", "'x' is no date"),
    ("seeds: 2020-13-45", "'2020-13-45' is no date"),
    ("seeds: !!map [a]", "expected a mapping node, but found sequence"),
    ("seeds: !!set {a}", "the tag 'tag:yaml.org,2002:set' is none of plain data"),
    ("seeds: !!python/object/apply:os.getpid []", "is none of plain data"),
    ('experiment: "\\UFFFFFFFF"', "line 1: malformed YAML"),
    ('experiment: "\\U00110000"', "line 1: malformed YAML"),
    ("? [a]\n: b", "found unhashable key"),
    # What is too much.
    (f"a: {BOMB}", "more than 10,000 values"),
    *((f"{key}: &x [*x]", "more than 20 levels") for key in ("kind", "exclude", "recovery")),
    ("a: &a {<<: *a}", "odd.yaml"),
    ("a: " + "[" * 21 + "]" * 21, "more than 20 levels"),
    ("a: " + "[" * 100_000, "more than 20 levels"),
    ("? " * 5000, "more than 20 levels"),
    ("a: [" + "1, " * 10_000 + "1]", "more than 10,000 values"),
    ("a: " + "1" * 5000, "a value of 5,000 characters; 100 at most"),
    ("a: 0x" + "f" * 90, "a number beyond 18,446,744,073,709,551,615"),
    ("a: 1" + ":1" * 100_000, "a value of 200,001 characters; 100 at most"),
    ("a: " + "x" * 5000, "a value of 5,000 characters; 4,096 at most"),
    ("x" * 600 + ": 1", "a key of 600 characters; 500 at most"),
    ("a: " + "x" * 1_000_000, "It has more than 262,144 bytes"),
    # What nobody would see.
    ('experiment: "\\ud800"', "the character \\ud800, which nobody would see"),
    ('experiment: "\\e[31m"', "the character \\x1b, which nobody would see"),
    ('experiment: "a\\u202Eb"', "the character \\u202e, which nobody would see"),
    ("a: 1\nb: \x07", "line 2: malformed YAML: the character \\x07, which may not be there"),
    # What is searched for passwords.
    ("# " + "?token" * 1500 + "\na: b", "unknown key"),
    ("# " + "mysql" * 20_000 + "\na: b", "unknown key"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "told"), TEXTS, ids=[ascii(t[:30]) for t, _ in TEXTS])
def test_a_text_that_is_no_configuration(here: Path, text: str, told: str) -> None:
    message = refused("plan", written(here, text))
    assert told in message
    assert "odd.yaml" in message


MANY = 10**9
FLAP = {"kind": "flap", "target": "server-0", "at_updates": 5, "times": 1000}
OFTEN = {"kind": "kill", "target": "server-0", "every": {"mtbf": 1e-6, "until": 1e9}}
LABELS = {f"k{number}": "none" for number in range(2000)}
VALUES: list[tuple[dict[str, Any], str]] = [
    *(
        ({"training": {"updates": 9, "workers": number}}, "expected at most 2000, got 10")
        for number in (10**6, MANY)
    ),
    *(
        ({"server": {key: MANY}}, f"server.{key}: expected at most 2000, got 1000000000")
        for key in ("shards", "servers", "spares")
    ),
    (
        {"recovery": {"preset": "chain", "durability": {"replicas": MANY}}},
        "recovery.durability.replicas: expected at most 2000",
    ),
    (
        {
            "server": {"shards": 1500},
            "recovery": {"preset": "chain", "durability": {"replicas": 1500}},
        },
        "the shards have 2,250,000 replicas in all; expected 2,000 at most",
    ),
    (
        {"server": {"shards": 1500}, "training": {"updates": 9, "workers": 1500}},
        "the trial has 3,001 nodes: 1,500 workers, 1,500 servers and replicas, 0 spares",
    ),
    (
        {"elastic": [{"at_updates": 1, "workers": MANY}]},
        "elastic.0.workers: expected at most 2000",
    ),
    (
        {"training": {"updates": 10**19}, "order_seed": -1},
        "order_seed: expected at least 0, got -1",
    ),
    ({"faults": [{**FLAP, "times": MANY}]}, "faults.0.times: expected at most 1000"),
    (
        {"faults": [FLAP, FLAP]},
        "there are 2,000 faults in all, with all that recur; expected 1,000",
    ),
    ({"faults": [OFTEN]}, "more than 1000 faults within 1e+09 s"),
    ({"faults": [FLAP] * 1001}, "faults: expected at most 1,000 entries, got 1,0"),
    (
        {
            "faults": [
                {**OFTEN, "every": {**OFTEN["every"], "distribution": "weibull", "shape": 1e-9}}
            ]
        },
        "faults.0.every.shape: expected at least 0.01, got 1e-09",
    ),
    ({"seeds": list(range(3000)), "axes": {"server.shards": [1, 2, 3, 4]}}, "has 12,000 trials"),
    (
        {"axes": {f"faults.{n}.at_updates": list(range(1, 1000)) for n in range(3)}},
        "the axes have 997,002,999 combinations before any is left out; expected 20,000 at most",
    ),
    ({"axes": {f"a{n}": [1] for n in range(900)}}, "axes: expected 20 axes at most, got 900"),
    (
        {"axes": {"recovery": ["none", "chain"]}, "exclude": [{"recovery": "none"}] * 500},
        "exclude: expected 100 entries at most, got 500",
    ),
    ({"axes": {"faults": [[LABELS]]}}, "is too long for a label"),
    ({"exclude": [{"recovery": LABELS}]}, "there is no axis 'recovery'"),
    ({"recovery": {"preset": ["chain"]}}, "unknown recovery strategy ['chain']"),
    ({"recovery": {"preset": {"a": "b"}}}, "unknown recovery strategy {'a': 'b'}"),
    ({"recovery": LABELS}, "recovery.k0: unknown key"),
    ({"experiment": "x" * 300}, "experiment: names a folder: expected 200 characters at most"),
    ({"experiment": "/" * 3000}, "(3,000 characters) names a folder"),
    ({"recovery": "y" * 4000}, "(4,000 characters); there are: none, checkpoint"),
    ({"workload": {"kind": "mlp", "hidden": [10**5, 10**5]}}, "weights; expected 100,000,000"),
    ({"workload": {"kind": "mlp", "hidden": [1] * 5000}}, "workload.hidden: expected at most 100"),
    ({"seeds": [-1] * 3000}, "and 2,990 more such mistakes"),
    ({f"odd{n}": 1 for n in range(3000)}, "odd0: unknown key"),
    (
        {"faults": [{"kind": "kill", "target": "x" + "-b" * 2000, "at_updates": 1}]},
        "no node 'x-b-b",
    ),
    (
        {"faults": [{**FLAP, "target": ["server-0", "server-1"], "by": "kill"}]},
        "there is no node 'server-0' to kill then",
    ),
    (
        {"faults": [{"kind": "trace", "csv": "t", "rows": [[1.0, "melt", "server-0", 1.0]]}]},
        "faults.0.rows: row 1, column 'kind': unknown kind 'melt'",
    ),
    (
        {"faults": [{"kind": "trace", "csv": "t", "rows": [[-1.0, "kill", "server-0", 1.0]]}]},
        "faults.0.rows: row 1, column 'seconds': expected a number of seconds from 0, got -1",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("values", "told"), VALUES, ids=[ascii(str(v))[:50] for v, _ in VALUES])
def test_values_that_ask_for_too_much(here: Path, values: dict[str, Any], told: str) -> None:
    message = refused("plan", with_values(here, **values))
    assert told in message
    assert "odd.yaml" in message


def test_a_trial_whose_name_is_too_long_for_a_folder_is_refused_by_plan_too(here: Path) -> None:
    keys = (
        "training.updates",
        "training.batch_size",
        "server.shards",
        "server.lease",
        "time_limit",
    )
    axes = {key: {f"{key.replace('.', '-')}-{'x' * 60}": 1} for key in keys}
    told = "which is too long for a folder: expected 200 characters at most"
    assert told in refused("plan", with_values(here, axes=axes))
    assert told in refused("run", with_values(here, axes=axes))
    assert [path.name for path in here.iterdir()] == ["odd.yaml"]


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_name_that_run_refuses_is_refused_by_plan_too(here: Path, command: str) -> None:
    assert "200 characters at most, got 300" in refused(
        command, with_values(here, experiment="x" * 300)
    )


def test_the_largest_that_is_allowed_is_planned_soon(here: Path) -> None:
    plan = [{**FLAP, "target": ["server-0", "worker-0"]}]
    large = with_values(here, faults=plan, training={"updates": 2000, "workers": 1990})
    began = time.process_time()
    code, out, _ = ended(["plan", large])
    assert code == 0
    assert time.process_time() - began < 2
    assert "Nodes needed at once, at most: 1993" in out


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("seeds.٣=1", "this is a list, and '٣' is none of its entries: its entries are 0 to 0"),
        ("seeds.²=1", "this is a list, and '²' is none of its entries: its entries are 0 to 0"),
        ("seeds." + "1" * 400 + "=1", "is none of its entries: its entries are 0 to 0"),
        ("seeds." + "1" * 5000 + "=1", "there is no such key"),
        (".".join("a" * 30) + "=1", "there is no such key"),
        ("\x1b[31m=1", "--set \\x1b[31m: there is no such key"),
        ("\udcff=1", "--set \\udcff: there is no such key"),
        ("seeds=\udcff", "the character \\udcff, which may not be there"),
        ("seeds=" + "[" * 1000, "more than 20 levels"),
        ("seeds=" + "1" * 4400, "a value of 4,400 characters; 100 at most"),
        ("seeds=[" + "-1," * 3000 + "]", "and 2,990 more such mistakes"),
        ("seeds=" + "x" * 100_000, "a value of 100,000 characters; 4,096 at most"),
        ("training.workers=" + "1" + "0" * 90, "a number beyond 18,446,744,073,709,551,615"),
        ("training.updates.x=1", "100 has no key 'x'"),
        ("experiment=" + "x" * 4000, "(4,011 characters): experiment: names a folder"),
    ],
)
def test_settings(here: Path, setting: str, told: str) -> None:
    assert told in refused("plan", with_values(here, seeds=[0]), "--set", setting)


def test_many_settings_are_not_more_than_a_document(here: Path) -> None:
    aliases = "[&a [" + "1," * 99 + "1]" + ", *a" * 90 + "]"
    several = [word for n in range(9) for word in ("--set", f"axes.a{n}={aliases}")]
    assert "more than 10,000 values" in refused("plan", with_values(here), *several)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("1,kill,server-0,1\n" * 1001, "expected 1,000 rows at most"),
        ("1,kill,server-0,1\n" * 100_000, "It has more than 1,048,576 bytes"),
        (f"1,kill,{'x' * 5000},1\n", "(5,000 characters) is the name of no node"),
        ("1,kill,\x1b[31m,1\n", "'\\x1b[31m' is the name of no node"),
        ("1,\x1b[2J,server-0,1\n", "unknown kind '\\x1b[2J'"),
        ("٣,kill,server-0,1\n", "expected a number of seconds from 0, got '٣'"),
        (f"{'1' * 5000},kill,server-0,1\n", "(5,000 characters)"),
        ("1,kill,server-0,1e999\n", "column 'duration': expected a number of seconds"),
        (f"1,kill,server-0,{'9' * 200_000}\n", "is no CSV in UTF-8: field larger than"),
    ],
)
def test_traces_with_odd_rows(here: Path, rows: str, told: str) -> None:
    (here / "odd.csv").write_text(HEADER + rows)
    message = refused("plan", with_values(here, faults=[{"kind": "trace", "csv": "odd.csv"}]))
    assert told in message
    assert f"faults.0.csv: {here / 'odd.csv'}" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEADER + "1,kill,server-0,1\n" * 1000, "the traces have 999,000 rows in all"),
        ("," * 1_000_000, "and 989 more such mistakes"),
    ],
    ids=["rows", "columns"],
)
def test_a_trace_that_is_named_many_times_is_read_once(here: Path, text: str, told: str) -> None:
    (here / "odd.csv").write_text(text)
    traces = [{"kind": "trace", "csv": "odd.csv"}] * 999
    assert told in refused("plan", with_values(here, faults=traces))


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "/dev/stdin", ".", "x" * 4000])
def test_what_is_no_file_is_not_read(here: Path, path: str) -> None:
    os.mkfifo(here / "pipe")
    trace = with_values(here, faults=[{"kind": "trace", "csv": path}])
    assert "cannot be read" in refused("plan", trace)
    refused("plan", path)
    files = {"ca_file": path, "cert": path}
    assert "cluster.tls.ca_file" in refused("plan", with_values(here, cluster={"tls": files}))


def test_no_server_is_asked_whether_checkpoints_can_go_there(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"ftp://127.0.0.1:{silent.getsockname()[1]}/x"
        durability = {"kind": "checkpoint", "path": address}
        code, _, err = ended(["plan", with_values(here, recovery={"durability": durability})])
        assert code == 0, err
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_a_password_in_an_odd_text_is_masked(here: Path) -> None:
    told = refused("plan", "http://ann:pa55word@host/" + "x" * 3000)
    assert "pa55word" not in told


@pytest.mark.parametrize(
    "words",
    [
        ["{}"],
        ["--{}"],
        ["run", "demo", "--parallel", "{}"],
        ["results", "demo", "--format", "{}"],
        ["ui", "--port", "{}"],
        ["compare", "{}", "{}"],
        ["results", "{}"],
        ["report", "{}"],
        ["status", "{}"],
        ["sync", "{}"],
        ["replay", "{}"],
        ["resume", "{}"],
        ["simulate", "--replay", "{}"],
        ["simulate", "--replay", "chain(2):{}"],
        ["plan", "{}"],
        ["run", "{}"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "name",
    [
        "x" * 5000,
        "x" * 999,
        "\x1b[31mred",
        "\udcff",
        "a/" * 3000,
        "..",
        "\n" * 100,
        "9" * 5000,
        "?token" * 900,
    ],
    ids=["long", "lengthy", "colour", "byte", "deep", "up", "lines", "digits", "secret"],
)
def test_names_on_the_command_line(here: Path, words: list[str], name: str) -> None:
    refused(*(word.format(name) for word in words))


@pytest.mark.slow
def test_a_command_of_the_shell_ends_so_too(here: Path) -> None:
    began = time.monotonic()
    for words in (["plan", "/dev/zero"], ["plan", written(here, f"a: {BOMB}")]):
        command = [sys.executable, "-m", "flows.cli", *words]
        run = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
        assert run.returncode == 2
        assert run.stdout == ""
        assert run.stderr.startswith("dps: ")
        assert run.stderr.count("\n") == 1
    assert time.monotonic() - began < 60
