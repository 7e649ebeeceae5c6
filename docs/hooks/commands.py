"""Insert the reference of the command line, generated from the commands of `dps`.

A page marks the place with `<!-- commands -->`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from flows.cli import GROUPS, app

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark of a page with a section for each command."""
    return markdown.replace(MARK, "\n".join(reference())) if MARK in markdown else markdown


def reference() -> Iterator[str]:
    """Yield the lines of all commands, by the groups of `dps --help`."""
    commands: Any = typer.main.get_command(app)
    for group in GROUPS:
        yield f"## {group}\n"
        for name, command in commands.commands.items():
            if command.rich_help_panel == group:
                yield from section(name, command)


def section(name: str, command: Any) -> Iterator[str]:
    """Yield the lines of one command: its synopsis, its description and its parameters."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    words = [each.name.upper() for each in arguments]
    yield f"### dps {name}\n"
    options = ["[OPTIONS]"] if len(arguments) < len(command.params) else []
    yield f"    {' '.join(['dps', name, *words, *options])}\n"
    yield f"{command.help}\n"
    if command.params:
        yield "| parameter | description |\n|---|---|"
        for each in command.params:
            title = ", ".join(each.opts) if each not in arguments else each.name.upper()
            yield f"| `{title}` | {each.help or ''}{default(each)} |"
        yield ""


def default(parameter: Any) -> str:
    """Return the default of a parameter as text; "" if it is required, empty or a switch."""
    value = parameter.default
    if parameter.required or callable(value) or value in (None, "", [], (), False, True):
        return " Required." if parameter.required else ""
    values = value if isinstance(value, list | tuple) else [value]
    return f" Default: {', '.join(str(getattr(each, 'value', each)) for each in values)}."
