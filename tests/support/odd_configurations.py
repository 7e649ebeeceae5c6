"""Odd configurations by the thousand, each given to `dps plan` in this process.

    python -m tests.support.odd_configurations SOURCE SEED COUNT

SOURCE is `shipped`, mutations of the configurations that come with dps, or `schema`, documents that
the models would take but for some values. Each has to end in a plan, or with exit code 2 and a
message of a screen at most, without a character that a terminal would obey, in 2 s of the
processor. Equal seeds give equal configurations. What was tried is printed as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from flows.cli import main
from flows.config.experiment import ExperimentConfig, packaged_names

SECONDS = 2.0
MOST_LINES = 40
MOST_CHARACTERS = 10_000
LARGE = 12_000  # values of a document: more than there may be
MOST_BYTES = 4 << 30  # of address space: what takes more ends in a MemoryError, not the machine

Draw = Callable[[st.SearchStrategy[Any]], Any]

# -- what is odd -----------------------------------------------------------------------------------

BOMB = "&a [x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
# Pieces of YAML, right and wrong.
PIECES = [
    *("!!int ''", "!!float ''", "!!bool x", "!!timestamp x", "!!null x", "!!int 1:x", "!!float ."),
    *("!!set {a}", "!!binary x", "!!map [a]", "!!seq {}", "!!str [a]", "!x y", "!!omap [a: b]"),
    *("!!python/object/apply:os.getpid []", "2020-13-45", "2020-01-01", "=", "<<: 1", "{<<: *a}"),
    *("&a", "*a", "&a [*a]", "&a {b: *a}", "&a {? *a : b}", BOMB, "[*a, *a, *a, *a]"),
    *("[" * 100, "{a: " * 100, "- " * 100, "? " * 100, "[{" * 50, "[[[[[[[[[[]]]]]]]]]]"),
    *("1" * 5000, "-" + "9" * 400, "0x" + "f" * 90, "1" + ":1" * 200, "1e400", "1e-400", "-0.0"),
    *("-1", "0", "1", "2", "1000000", "1000000000", "18446744073709551615", "18446744073709551616"),
    *(".inf", "-.inf", ".nan", "1e308", "5e-324", "0.001", "true", "no", "null", "~", "''", "[]"),
    *("{}", "[[]]", "{a: {}}", "{1: 2}", "{null: null}", "{true: x}", "{[a]: b}", "{1.5: x}"),
    *('"\\ud800"', '"\\e[31mred"', '"\\UFFFFFFFF"', '"\\0"', '"\\x07"', '"\\u202e"', '"\\n\\n\\n"'),
    *("\x00", "\x07", "\x1b[2J", "\x85", "\ufeff", "\u202eabc", "\ud83d", "٣", "²", "Ⅷ", "é" * 50),
    *("x" * 300, "x" * 5000, "x" * 100_000, "a.b" * 200, "#" * 3000, "?token" * 1500, "'" * 99),
    *("http://a:b@c", "mysql" * 2000, "ftp://x/?password=y", "pipe", "/dev/zero", "/dev/null"),
    *(
        "good.csv",
        "bad.csv",
        "long.csv",
        ".",
        "/",
        "a" * 5000 + ".csv",
        "nowhere://x",
        "memory://x",
    ),
    *("|", ">-", "---", "...", "%YAML 9.9", "\t", "- -", ":", ",", "]", "}", '"', "a: b: c", "\n"),
    *("server-0", "server-0-b", "worker-1", "chain", "checkpoint", "stateless", "kill", "every"),
    *("[" + "1, " * 3000 + "1]", "{" + ", ".join(f"k{i}: {i}" for i in range(2000)) + "}"),
    *("x" + "-b" * 2000, "[server-0, server-0]", "{preset: [chain]}", "{preset: {a: b}}"),
]
# Values as they are in a document that was read, or could be.
VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        10**6,
        10**9,
        2**63,
        2**64 - 1,
        2**64,
        10**400,
        -(10**400),
    ),
    *(0.0, -0.0, 1e-300, 5e-324, 1e308, float("inf"), float("nan"), 0.01, 1e-9, 1.5),
    *("", " ", "none", "chain", "custom", "server-0", "server-0-b-b", "worker-1", "x" * 300),
    *(
        "x" * 5000,
        "\ud800",
        "\x1b[31m",
        "\u202e",
        "٣",
        "\n",
        "a/b",
        "..",
        ".",
        "-",
        "~",
        "*",
        "%s{}",
    ),
    *("memory://x", "/dev/zero", "pipe", "good.csv", "bad.csv", "long.csv", "http://a:b@c", "::"),
    *([], {}, [[]], [None], ["a", "a"], {"": ""}, {"kind": "kill"}, {"preset": ["chain"]}),
    *({"kind": {"a": 1}}, {"kind": []}, list(range(3000)), ["x"] * 3000, [-1] * 3000),
    *({str(n): n for n in range(2000)}, {"role": "server", "index": 10**9}, {"pick": "all"}),
    *({"shard": 0, "position": 1.5}, [10**5, 10**5], [1] * 5000),
    {"mtbf": 1e-9, "until": 1e9, "distribution": "weibull", "shape": 1e-9},
    {"kind": "flap", "target": ["server-0"], "at_updates": 1, "times": 1000},
]
deep: Any = []
for _ in range(200):
    deep = [deep]
VALUES.append(deep)

texts = st.text(max_size=10) | st.text("abcxyz019_-.:,{}[]&*!#'\" \n", max_size=10)
# Of several that are joined, each is as likely: those that are known to be odd shall be the most.
values, pieces = st.sampled_from(VALUES), st.sampled_from(PIECES)
odd_values = values | values | values | values | texts | st.integers() | st.floats()
odd_pieces = pieces | pieces | pieces | pieces | texts

# -- mutations of what is shipped ------------------------------------------------------------------

SHIPPED = [
    re.sub(r"^ *#.*\n", "", (root / f"{name}.yaml").read_text("utf-8"), flags=re.MULTILINE)
    for root in [Path(str(files("flows.configs")))]
    for name in packaged_names()
]


@st.composite
def shipped(draw: Draw) -> str:
    """A shipped configuration with some lines or values changed."""
    text = draw(st.sampled_from(SHIPPED))
    if draw(st.booleans()):
        data = yaml.safe_load(text)
        for _ in range(draw(st.integers(1, 3))):
            change_value(draw, data)
        text = dumped(data)
        if draw(st.integers(0, 3)):
            return text
    for _ in range(draw(st.integers(1, 3))):
        text = changed_text(draw, text)
    return text


def change_value(draw: Draw, data: Any) -> None:
    """Change something in a document: drop, replace, rename, repeat, nest, or alias a value."""
    places = list(places_in(data))
    if not places:
        return
    where, key = draw(st.sampled_from(places))
    value = where[key]
    match draw(st.integers(0, 7)):
        case 0:
            del where[key]
        case 1 if isinstance(where, dict):
            where[draw(st.sampled_from(["", "kind", "preset", "x" * 600, 1, None, "\x1b"]))] = value
        case 2:
            often = draw(st.sampled_from([1, 2, 50, 3000]))
            where[key] = [deepcopy(value) for _ in range(min(often, LARGE // size(value)))]
        case 3:
            where[key] = {draw(st.sampled_from(["kind", "a", "preset", "fault"])): value}
        case 4:
            other, at = draw(st.sampled_from(places))
            where[key] = other[at]  # written as an alias, and possibly of what holds it
        case _:
            where[key] = deepcopy(draw(odd_values))


def size(data: Any) -> int:
    """How many values there are in one."""
    return 1 + sum(1 for _ in places_in(data))


def places_in(data: Any, seen: frozenset[int] = frozenset()) -> Iterator[tuple[Any, Any]]:
    """Every place of a value in a document."""
    if id(data) in seen or not isinstance(data, dict | list):
        return
    for key in data if isinstance(data, dict) else range(len(data)):
        yield data, key
        yield from places_in(data[key], seen | {id(data)})


def changed_text(draw: Draw, text: str) -> str:
    """Change a line: drop, repeat, replace its value, put something into it, or end there."""
    lines = text.split("\n")
    at = draw(st.integers(0, len(lines) - 1))
    line = lines[at]
    match draw(st.integers(0, 9)):
        case 0:
            del lines[at]
        case 1:
            lines[at:at] = [line] * draw(st.sampled_from([1, 1, 5000]))
        case 2:
            lines[at] = " " * draw(st.integers(0, 8)) + line.strip()
        case 3:
            place = draw(st.integers(0, len(line)))
            lines[at] = line[:place] + draw(odd_pieces) + line[place:]
        case 4:
            lines[at:] = [line[: draw(st.integers(0, len(line)))]]
        case _:
            lines[at] = f"{line.split(':')[0]}: {draw(odd_pieces)}"
    return "\n".join(lines)


# -- documents by the schema -----------------------------------------------------------------------

SCHEMA = ExperimentConfig.model_json_schema()
for kind in ("torch", "cnn"):  # need a package that is not there
    SCHEMA["properties"]["workload"]["oneOf"].remove(
        {"$ref": SCHEMA["properties"]["workload"]["discriminator"]["mapping"][kind]}
    )
SOUND: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 100},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
}
WORDS = [
    *("server-0", "server-1", "worker-0", "store-0", "spare-0", "replica-0-1", "server-0-b"),
    *("none", "chain", "checkpoint", "small", "accuracy_final", "updates_lost", "server", "worker"),
    *(
        "good.csv",
        "bad.csv",
        "layer0.weight",
        "*",
        "2GB",
        "00:10:00",
        "tcp://10.0.0.1:8786",
        "head",
    ),
]
AXES = [
    *("recovery", "recovery.durability", "recovery.outage.limit", "consistency", "server.shards"),
    *("training.workers", "training.updates", "faults", "optimizer", "workload", "cluster"),
    *("time_limit", "elastic", "filters", "server", "dataset.kind"),
]


@st.composite
def by_schema(draw: Draw) -> str:
    """A document that the models would take, but for a value here and there."""
    odd = draw(st.sampled_from([0, 0, 10, 40, 200]))
    drawn_keys = draw(st.lists(st.sampled_from([*SCHEMA["properties"]]), max_size=4))
    data = deepcopy(SOUND)
    for key in drawn_keys:
        data[key] = drawn(draw, SCHEMA["properties"][key], odd, 0)
    if draw(st.integers(0, 2)):
        axes = draw(st.lists(st.sampled_from(AXES), max_size=3, unique=True))
        data["axes"] = {axis: axis_values(draw, axis, odd) for axis in axes}
        data.pop("zip", None)
        data.pop("exclude", None)
        data["seeds"] = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
    return dumped(data)


def axis_values(draw: Draw, axis: str, odd: int) -> Any:
    """Values of an axis: a list of them, or with labels."""
    schema: Any = SCHEMA
    for part in axis.split("."):
        while "properties" not in schema:
            schema = resolved(draw(st.sampled_from(choices_of(resolved(schema)))))
            if "properties" not in schema and "$ref" not in schema and not branches(schema):
                return [draw(odd_values)]
        if part not in schema["properties"]:
            return [draw(odd_values)]
        schema = schema["properties"][part]
    values = [drawn(draw, schema, odd, 1) for _ in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        return values
    return {f"label {number}": value for number, value in enumerate(values)}


def resolved(schema: Any) -> Any:
    name = schema.get("$ref", "").rpartition("/")[2]
    return SCHEMA["$defs"][name] if name else schema


def branches(schema: Any) -> list[Any]:
    found: list[Any] = schema.get("oneOf") or schema.get("anyOf") or []
    return found


def choices_of(schema: Any) -> list[Any]:
    return branches(schema) or [schema]


def drawn(draw: Draw, schema: Any, odd: int, depth: int) -> Any:
    """A value for a schema; about `odd` of 1,000 are others."""
    if odd and draw(st.integers(0, 999)) < odd:
        return deepcopy(draw(odd_values))
    schema = resolved(schema)
    if choices := branches(schema):
        return drawn(draw, draw(st.sampled_from(choices)), odd, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    match schema.get("type"):
        case "object" if "properties" in schema:
            required = schema.get("required", ())
            return {
                key: drawn(draw, inner, odd, depth + 1)
                for key, inner in schema["properties"].items()
                if key in required or not draw(st.integers(0, 3))
            }
        case "object":
            keys = draw(st.lists(st.sampled_from(WORDS), max_size=2, unique=True))
            inner = schema.get("additionalProperties")
            inner = inner if isinstance(inner, dict) else {}
            return {key: drawn(draw, inner, odd, depth + 1) for key in keys}
        case "array":
            if "prefixItems" in schema:
                return [drawn(draw, inner, odd, depth + 1) for inner in schema["prefixItems"]]
            fewest = schema.get("minItems", 0)
            number = draw(st.integers(fewest, fewest + 3))
            items = schema.get("items", {})
            return [drawn(draw, items, odd, depth + 1) for _ in range(number)]
        case "integer":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
            high = schema.get("maximum", 10**6)
            few = st.integers(low, min(high, low + 4))
            return draw(few | few | st.integers(low, high))
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
            high = schema.get("maximum", schema.get("exclusiveMaximum", 1e300))
            return draw(st.floats(low, high, allow_nan=False) | st.sampled_from([0.5, 0.1, 1.5]))
        case "boolean":
            return draw(st.booleans())
        case "null":
            return None
        case "string":
            return draw(st.sampled_from(WORDS))
        case _:
            return draw(odd_values)


def dumped(data: Any) -> str:
    """A document as YAML."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes whatever there is, half characters as the escapes that stand for them."""


# -- each of them ----------------------------------------------------------------------------------

KEYS = [*AXES, "seeds", "axes", "faults.0.target", "faults.٣", "faults.²", "a" * 600, "a..b", ".x"]
assignments = st.tuples(st.sampled_from(KEYS) | texts, odd_pieces).map("=".join)
settings_of = st.just([]) | st.just([]) | st.lists(assignments, max_size=2)


class Hanging(BaseException):
    """It takes far too long; where, its traceback says."""


@dataclass
class Tried:
    """What came of the configurations."""

    tried: int = 0
    plans: int = 0
    refused: int = 0
    slowest: float = 0.0
    peak_mb: float = 0.0

    def judge(self, text: str, overrides: list[str]) -> None:
        """Have a configuration planned; what may not be fails."""
        Path("odd.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        words = [word for override in overrides for word in ("--set", override)]
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, 3 * SECONDS)
        try:
            code, out, err = ended(["plan", "odd.yaml", *words])
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        took = time.process_time() - began
        self.tried += 1
        self.slowest = max(self.slowest, took)
        assert took < SECONDS, f"{took:.1f} s"
        assert code in (0, 2), f"exit code {code}"
        assert printable(out), "control characters in the plan"
        assert printable(err), "control characters in the message"
        if code == 0:
            self.plans += 1
        else:
            self.refused += 1
            assert out == ""
            assert err
            assert len(err) <= MOST_CHARACTERS, f"{len(err):,} characters"
            assert err.count("\n") <= MOST_LINES, f"{err.count(chr(10)):,} lines"
            assert "Traceback" not in err


def ended(words: list[str]) -> tuple[int, str, str]:
    """Run the command as the console script does; both streams take UTF-8 only."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    sys.argv = ["dps", *words]
    code = 0
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
    out, err = (stream.buffer.getvalue().decode("utf-8") for stream in streams)
    return code, out, err


def printable(text: str) -> bool:
    """Whether there is nothing in a text that a terminal would obey, but for ends of lines."""
    return not any(
        (char < " " and char not in "\n\t") or "\x7f" <= char < "\xa0" or char in "\u202e\u2028"
        for char in text
    )


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def too_slow(number: int, frame: FrameType | None) -> NoReturn:
    raise Hanging


def try_all(source: str, number: int, count: int) -> Tried:
    """Try so many configurations of a source, in a folder with some files that they may name."""
    tried = Tried()
    os.mkfifo("pipe")
    header = "seconds,kind,target,duration\n"
    Path("good.csv").write_text(f"{header}1,kill,server-0,1\n2,pause,worker-0,1\n")
    Path("bad.csv").write_text(f"{header}1,kill,server-0\x1b[31m,1e999\n")
    Path("long.csv").write_text(header + "1,kill,server-0,1\n" * 20_000)
    signal.signal(signal.SIGPROF, too_slow)
    assert ended(["plan", "demo"])[0] == 0
    before = peak_mb()

    documents = {"shipped": shipped(), "schema": by_schema()}[source]

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(documents, settings_of)
    def each(text: str, overrides: list[str]) -> None:
        tried.judge(text, overrides)

    each()
    tried.peak_mb = round(peak_mb() - before, 1)
    return tried


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        print(json.dumps(asdict(try_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
