"""Owns how a template of this package becomes an HTML page, with every value escaped."""

from __future__ import annotations

from typing import Any


def page(template: str, **content: Any) -> str:
    """Return the page that a template makes of its content."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("flows", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**content)
