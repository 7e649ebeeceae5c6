"""Insert the reference of all YAML keys, generated from the JSON schema of configurations.

A page marks the place with `<!-- keys -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from flows.config.experiment import schema

MARK = "<!-- keys -->"
BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
OPEN = (None, "null", "object")  # types of forms that are not listed if they have no other keys
Node = dict[str, Any]  # a part of the schema


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark of a page with a heading and a table for each section."""
    return markdown.replace(MARK, "\n".join(Reference().lines())) if MARK in markdown else markdown


class Reference:
    """The sections of a configuration by dotted key; one that occurs repeatedly is listed once.

    A group is a section with a `kind`; each kind has its own keys.
    """

    def __init__(self) -> None:
        self.root = schema()
        self.sections: dict[str, Node] = {}
        top = self.root["properties"]
        for key, node in top.items():  # before the sections within these
            self._add(key, node)
        for key, section in list(self.sections.items()):
            self._add_inner(key, section)
        order = list(top)
        by_top = sorted(self.sections, key=lambda path: order.index(path.split(".")[0]))
        self.sections = {path: self.sections[path] for path in by_top}

    def lines(self) -> Iterator[str]:
        """Yield the lines of the reference."""
        yield from self._table(self.root["properties"].items(), self.root["required"])
        for path, section in self.sections.items():
            yield f"{'###' if '.' in path else '##'} `{path}` {{#{path}}}\n"
            yield f"{text(section)}\n"
            if is_group(section):
                yield from self._group(path, section)
            else:
                yield from self._table(section["properties"].items(), section.get("required", ()))

    # -- sections ----------------------------------------------------------------------------------

    def _add(self, path: str, node: Node) -> list[str]:
        """Add the sections that are values of a key, and return the paths of the new ones."""
        added = []
        forms = self._forms(node)
        several = sum("properties" in form for form in forms) > 1
        for form in forms:
            for inner in (form.get("items"), form.get("additionalProperties")):
                if isinstance(inner, dict):
                    added += self._add(path, {"description": node.get("description"), **inner})
            if (is_group(form) or "properties" in form) and self._path_of(form) is None:
                name = f"{path}.{next(iter(form['properties']))}" if several else path
                self.sections[name] = {"description": node.get("description"), **form}
                added.append(name)
        return added

    def _add_inner(self, path: str, section: Node) -> None:
        for each in self._kinds(section).values() if is_group(section) else [section]:
            for key, node in each["properties"].items():
                for name in self._add(f"{path}.{key}", node):
                    self._add_inner(name, self.sections[name])

    def _forms(self, node: Node) -> list[Node]:
        """Return the forms of a value, without null and without kinds as words."""
        if "$ref" in node:
            return self._forms(self.root["$defs"][node["$ref"].removeprefix("#/$defs/")])
        if "anyOf" not in node:
            return [node] if node.keys() - {"type"} or node.get("type") not in OPEN else []
        forms = [form for each in node["anyOf"] for form in self._forms(each)]
        grouped = any(map(is_group, forms))
        return [form for form in forms if not (grouped and form.keys() == {"enum"})]

    def _kinds(self, group: Node) -> dict[str, Node]:
        """Return the sections of a group by kind; a section with several kinds joins them."""
        kinds: dict[str, list[str]] = {}
        for kind, reference in group["discriminator"]["mapping"].items():
            kinds.setdefault(reference, []).append(kind)
        order = [each["$ref"] for each in group["oneOf"]]
        return {"`, `".join(kinds[each]): self._forms({"$ref": each})[0] for each in order}

    def _path_of(self, form: Node) -> str | None:
        """Return the path of the section with this form, or of the group with all its kinds."""
        for path, known in self.sections.items():
            if is_group(form) and is_group(known):
                ours, theirs = (each["discriminator"]["mapping"] for each in (form, known))
                if ours.items() <= theirs.items():
                    return path
            elif form.get("properties", {}) and form["properties"] == known.get("properties"):
                return path
        return None

    # -- text --------------------------------------------------------------------------------------

    def _group(self, path: str, group: Node) -> Iterator[str]:
        """Yield the keys that most kinds share, and then each kind with its other keys."""
        kinds = self._kinds(group)
        having: dict[str, list[str]] = {}
        for kind, section in kinds.items():
            for key, node in section["properties"].items():
                if key != "kind":
                    required = key in section.get("required", ())
                    having.setdefault(json.dumps([key, node, required]), []).append(kind)
        shared = [names for names in having.values() if 2 * len(names) > len(kinds)]
        for names in dict.fromkeys(map(tuple, shared)):
            others = "`, `".join(kind for kind in kinds if kind not in names)
            yield f"Keys of all kinds{f' except `{others}`' if others else ''}:\n"
            yield from self._rows(json.loads(key) for key in having if having[key] == [*names])
        for kind, section in kinds.items():
            yield f"#### `{kind}` {{#{path}.{kind.split('`')[0]}}}\n\n{text(section)}\n"
            own = [key for key, names in having.items() if kind in names and names not in shared]
            yield from self._rows(map(json.loads, own))

    def _table(self, keys: Iterable[tuple[str, Node]], required: Iterable[str]) -> Iterator[str]:
        yield from self._rows((key, node, key in required) for key, node in keys)

    def _rows(self, keys: Iterable[tuple[str, Node, bool]]) -> Iterator[str]:
        rows = [
            f"| `{key}` | {self._type(node)} | {'required' if required else default(node)} "
            f"| {text(node)} |"
            for key, node, required in keys
        ]
        if rows:
            yield from ("| key | type | default | description |", "|---|---|---|---|", *rows, "")

    def _type(self, node: Node) -> str:
        forms = list(dict.fromkeys(map(self._form, self._forms(node)))) or ["any"]
        return " or ".join(form for form in forms if form != "integer" or "number" not in forms)

    def _form(self, form: Node) -> str:
        if (path := self._path_of(form)) is not None:
            last = path.rpartition(".")[2]
            word = f"`{{{last}: …}}`" if last in form.get("properties", ()) else "section"
            return f"[{'kind' if is_group(form) else word}](#{path})"
        if "enum" in form or "const" in form:
            return ", ".join(f"`{value(each)}`" for each in form.get("enum", [form.get("const")]))
        if "prefixItems" in form:
            return f"[{', '.join(map(self._type, form['prefixItems']))}]"
        if form.get("type") == "array":
            return f"list of {self._type(form['items'])}" if form.get("items") else "list"
        if form.get("type") == "object":
            inner = form.get("additionalProperties")
            return f"name → {self._type(inner)}" if isinstance(inner, dict) else "mapping"
        bounds = ",".join(f" {sign} {form[key]:,}" for key, sign in BOUNDS.items() if key in form)
        return f"{form.get('type', 'any')}{bounds}"


def is_group(form: Node) -> bool:
    """Whether a form is a choice of kinds."""
    return "discriminator" in form


def default(node: Node) -> str:
    """Return the default of a key as text; "" if it is null, empty or a section."""
    found = node.get("default")
    found = found.get("kind") if isinstance(found, dict) else found
    values = found if isinstance(found, list) else [found]
    return ", ".join(f"`{value(each)}`" for each in values if each not in (None, ""))


def value(each: Any) -> str:
    """Return a value as YAML has it."""
    if isinstance(each, float):
        return f"{each:g}"
    return each if isinstance(each, str) else json.dumps(each)


def text(node: Node) -> str:
    """Return a description on one line, with the words of YAML."""
    line = " ".join((node.get("description") or "").split())
    return re.sub(r"\bNone\b", "`null`", line).replace("|", "\\|")
