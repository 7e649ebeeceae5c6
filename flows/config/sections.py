"""Sections: the pydantic models that check a configuration, most of them derived.

A kind that can be chosen in YAML (an update rule, a filter, a durability …) is a frozen dataclass,
of dps or of an installed package. `section_of` derives its section: keys, types and defaults are
those of the fields, descriptions are those of the docstring, and what a value may be is checked by
the dataclass itself. So a new field is one line in the dataclass.

A `Group` is a choice of kinds. A package adds kinds by entry points, such as ``mine =
"package.module:Class"`` in the group ``dps.rules``. They are looked up when a kind is named that is
none of dps's own.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PydanticUserError,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from dps.errors import ConfigurationError
from dps.protocol.wire import GROUPS, message
from flows.config.document import FromCommandLine
from flows.config.errors import refuse, refusing, suggest
from flows.quoting import quoted, shown

LONGEST_NAME = 200  # of experiments and trials, which are names of folders
LONGEST_REASON = 300

# -- values ----------------------------------------------------------------------------------------

# With this as context, what was recorded is read: files that it names were there then.
OF_RECORD = {"of_record": True}


def is_of_record(info: ValidationInfo) -> bool:
    """Whether a section is read from a record: the files that it names need not be there."""
    return info.context is not None and OF_RECORD.items() <= info.context.items()


def folder_of(info: ValidationInfo) -> Path:
    """Return the folder of the configuration that a section is read from, by the context."""
    folder: Path = (info.context or {}).get("folder", Path())
    return folder


def absolute(path: Any, info: ValidationInfo) -> Any:
    """Return a path as absolute: see `InputPath`."""
    if not isinstance(path, str) or is_of_record(info):
        return path
    folder = Path() if isinstance(path, FromCommandLine) else folder_of(info)
    return str(Path(folder, os.path.expanduser(path)).absolute())


# The path of an input file or folder, also for a dataclass field of type `Path`. It is relative
# to the configuration file, or to the working directory if set by --set, and recorded as absolute.
InputPath = Annotated[str, BeforeValidator(absolute)]


def like(pattern: str, expected: str) -> AfterValidator:
    """Return a validator of texts; its error message contains `expected`."""

    def check(text: str) -> str:
        if not re.search(pattern, text):
            refuse(f"expected {expected}; got {quoted(text)}")
        return text

    return AfterValidator(check)


# A name that folders can have.
SafeName = Annotated[
    str,
    Field(max_length=LONGEST_NAME),
    like("^[A-Za-z0-9][A-Za-z0-9._-]*$", "a name of letters, digits and . _ - (it names a folder)"),
]

# -- sections --------------------------------------------------------------------------------------


class Section(BaseModel):
    """Base of every section: immutable, exact types, no unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # the schema and the documentation have them
    )

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            if key not in cls.model_fields:
                refuse(f"unknown key; {suggest(str(key), cls.model_fields)}", key=str(key))
        return data


class Derived(Section):
    """Base of derived sections; a base derived from it adds keys around those of the dataclass.

    Attributes
    ----------
    made_class
        The dataclass whose fields are keys of the section.
    given
        Its fields that are no keys, because dps provides their values; of the base.
    provider
        Name and version of the distribution that registers the kind; None: dps.
    """

    made_class: ClassVar[type]
    given: ClassVar[tuple[str, ...]] = ()
    provider: ClassVar[tuple[str, str] | None] = None
    _recipe: ClassVar[tuple[Any, ...]]

    def build(self, *args: Any, **given: Any) -> Any:
        """Return the object that the section stands for; raises `ConfigurationError`."""
        return self.made(**given)

    def made(self, **given: Any) -> Any:
        """Return an object of the class, with these settings and the values that dps provides.

        Raises `ConfigurationError` if the class refuses them.
        """
        names = [field.name for field in dataclasses.fields(self.made_class) if field.init]
        settings = {name: getattr(self, name) for name in names if name not in self.given}
        built = {
            name: value.build() if isinstance(value, Derived) else value
            for name, value in settings.items()
        }
        try:
            return self.made_class(**built, **given)
        except ConfigurationError:
            raise
        except Exception as error:
            reason = shown(f"{self.made_class.__name__}: {error}", LONGEST_REASON)
            raise ConfigurationError(reason) from error

    def check_settings(self) -> None:
        """Raise `ConfigurationError` for settings that the class refuses."""
        self.build()

    @model_validator(mode="after")
    def _is_accepted(self) -> Self:
        try:
            self.check_settings()
        except ConfigurationError as error:
            # A message of `dps.core.ranges`: "TopK: share=2, expected a number above 0, at most 1".
            match = re.fullmatch(r"(?:\w+: )?(\w+)=(.+?), (expected .+)", str(error), re.DOTALL)
            if match is None or match[1] not in type(self).model_fields:
                refuse(str(error))
            refuse(f"{match[3]}, got {match[2]}", key=match[1])
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Other processes derive the class again.
        return _blank, self._recipe, self.__getstate__()


def _blank(*recipe: Any) -> Derived:
    section = section_of(*recipe)
    return section.__new__(section)


def section_of(
    cls: type,
    base: type[Derived] = Derived,
    kind: str | None = None,
    provider: tuple[str, str] | None = None,
) -> type[Derived]:
    """Derive the section of a frozen dataclass; the same arguments give the same class.

    Parameters
    ----------
    cls
        The dataclass.
    base
        The section to derive from, whose fields are keys too.
    kind
        The value of the key `kind`; None: there is no such key.
    provider
        Name and version of the distribution that registers the kind; None: dps.

    Examples
    --------
    >>> from dps import TopK
    >>> section_of(TopK, kind="top_k").model_validate({"kind": "top_k", "share": 0.1}).build()
    TopK(share=0.1)
    """
    return _section_of(cls, base, kind, provider)  # the cache keys keyword arguments separately


@cache
def _section_of(
    cls: type, base: type[Derived], kind: str | None, provider: tuple[str, str] | None
) -> type[Derived]:
    fields: dict[str, Any] = {} if kind is None else {"kind": (Literal[kind], ...)}
    hints, described = get_type_hints(cls, include_extras=True), _descriptions(cls)
    for field in dataclasses.fields(cls):
        if field.init and field.name not in base.given:
            about = Field(description=described.get(field.name), **_default(field))
            fields[field.name] = (_as_written(hints[field.name], cls), about)
    summary = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    name, no_source = f"{cls.__name__}Section", {"use_attribute_docstrings": False}
    section = create_model(name, __base__=base, __doc__=summary, __cls_kwargs__=no_source, **fields)
    section.made_class, section.provider = cls, provider
    section._recipe = (cls, base, kind, provider)
    return section


def kind_of(cls: type) -> str:
    """Return the name of a class in YAML: its `kind` or `name`, or the class name in snake case."""
    declared = getattr(cls, "kind", getattr(cls, "name", None))
    if isinstance(declared, str):
        return declared
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    if field.default_factory is not dataclasses.MISSING:
        return {"default_factory": field.default_factory}
    if field.default is dataclasses.MISSING:
        return {}
    if dataclasses.is_dataclass(field.default):
        made: Any = field.default
        is_kind = any(type(made) in group.own for group in _GROUPS.values())
        kind = {"kind": kind_of(type(made))} if is_kind else {}
        written = {**kind, **dataclasses.asdict(made)}
        return {"default_factory": lambda: written, "validate_default": True}
    return {"default": field.default}


def _as_written(hint: Any, owner: type) -> Any:
    """Return the type of a field as YAML can give it: a list for a tuple, a section for a kind."""
    if isinstance(hint, type) and hint in _GROUPS:
        group = _GROUPS[hint].without(owner)
        return Annotated[group.base, group]
    if dataclasses.is_dataclass(hint):
        return section_of(cast("type", hint))
    if hint is Path:
        return Annotated[Path, Field(strict=False), BeforeValidator(absolute)]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Sequence:
        origin, args = tuple, (*args, ...)
    if origin is tuple:
        inner = tuple(arg if arg is Ellipsis else _as_written(arg, owner) for arg in args)
        return Annotated[tuple[inner], Field(strict=False)]  # type: ignore[valid-type]
    if origin in (Union, UnionType):
        return Union[tuple(_as_written(arg, owner) for arg in args)]  # noqa: UP007 - of types that are computed
    return hint


def _descriptions(cls: type) -> dict[str, str]:
    """Return the descriptions of fields in the NumPy docstrings of a class and its bases."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    descriptions = {} if cls.__base__ is None else _descriptions(cls.__base__)
    sections = r"(?:Parameters|Attributes)\n-+\n(.*?)(?=\n\n\w+\n-+\n|\Z)"
    for section in re.findall(sections, doc, re.DOTALL):
        entries = re.findall(r"^(\w[\w, ]*)\n((?:(?:    .*)?\n?)+)", section, re.MULTILINE)
        for names, text in entries:
            descriptions |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return descriptions


# -- groups ----------------------------------------------------------------------------------------

_GROUPS: dict[type, Group] = {}  # by the type of what is chosen


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """A choice of kinds, used as an annotation: ``Annotated[FilterSection, FILTERS]``.

    Kinds are the `own` classes, the sections in the annotated union that are written by hand, and
    those that packages register. A bare kind stands for a section with all other keys left out.

    Attributes
    ----------
    own
        The dataclasses of dps.
    base
        The base class of the derived sections; its fields are keys of each.
    bases
        Other base classes, by own class.
    name
        Of the group of entry points; "": packages register none.
    of
        The type of field of other dataclasses that is chosen in this group.
    parent, own_parts
        The required base class of a registered class, and attributes that it must override.
    """

    own: tuple[type, ...]
    base: type[Derived] = Derived
    bases: Mapping[type, type[Derived]] = dataclasses.field(default_factory=dict)
    name: str = ""
    of: type | None = None
    parent: type = object
    own_parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.of is not None:
            _GROUPS[self.of] = self

    @cached_property
    def derived(self) -> dict[str, type[Derived]]:
        """The sections of the own classes by kind."""
        return {
            kind_of(cls): section_of(cls, self.bases.get(cls, self.base), kind_of(cls))
            for cls in self.own
        }

    def without(self, cls: type) -> Group:
        """Return the group without one of its classes, which cannot be nested in itself."""
        own = tuple(each for each in self.own if each is not cls)
        return dataclasses.replace(self, own=own, of=None)

    def default(self, cls: type) -> Any:
        """Return the section of an own class with all settings left out."""
        kind = kind_of(cls)
        return self.derived[kind].model_validate({"kind": kind})

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        sections: dict[str, type[Section]] = {**self.derived, **_written_sections(source)}

        def chosen(data: Any, info: ValidationInfo) -> Any:
            if isinstance(data, Section):
                return data
            data = {"kind": data} if isinstance(data, str) else data
            if not isinstance(data, dict):
                refuse(f"expected a section with keys, got {quoted(data)}")
            if not isinstance(kind := data.get("kind"), str):
                refuse("needs a 'kind'")
            with refusing("kind"):
                section = sections.get(kind) or self._registered_section(kind, sections)
            return section.model_validate(data, context=info.context)

        choice = {kind: handler.generate_schema(section) for kind, section in sections.items()}
        return core_schema.with_info_before_validator_function(
            chosen,
            core_schema.any_schema(),
            json_schema_input_schema=core_schema.tagged_union_schema(choice, "kind"),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        choice = handler(schema)
        return {"anyOf": [{"enum": sorted(choice["discriminator"]["mapping"])}, choice]}

    def _registered_section(self, kind: str, own: Mapping[str, Any]) -> type[Derived]:
        registered = _registered(self.name) if self.name else {}
        for name, point in registered.items():
            if name in own:
                raise ConfigurationError(f"{_origin(point)}: dps already has a kind of this name")
        if kind not in registered:
            raise ConfigurationError(
                f"unknown kind {quoted(kind)}; {suggest(kind, [*own, *registered])}"
            )
        return _section_of_package(self, kind)


def _written_sections(source: Any) -> dict[str, Any]:
    sections = [each for each in get_args(source) if "kind" in each.model_fields]
    return {
        kind: section
        for section in sections
        for kind in get_args(section.model_fields["kind"].annotation)
    }


def derived_in(value: Any) -> Iterator[Derived]:
    """Yield the derived sections in a configuration, or in a part of it."""
    if isinstance(value, Derived):
        yield value
    if isinstance(value, BaseModel):
        value = [getattr(value, name) for name in type(value).model_fields]
    elif isinstance(value, Mapping):
        value = list(value.values())
    for part in value if isinstance(value, list | tuple) else ():
        yield from derived_in(part)


def distributions(config: Any) -> dict[str, str]:
    """Return the distributions that provide kinds of a configuration, each with its version."""
    return dict(sorted({each.provider for each in derived_in(config) if each.provider}))


def modules(config: Any) -> tuple[str, ...]:
    """Return the modules that the registered kinds of a configuration are in."""
    imported = {each.made_class.__module__ for each in derived_in(config) if each.provider}
    return tuple(sorted(imported))


# -- packages --------------------------------------------------------------------------------------


@cache
def _registered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name; raises `ConfigurationError` if two share one."""
    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        other = points.setdefault(point.name, point)
        if other != point:
            raise ConfigurationError(
                f"{_origin(point)}: {_origin(other)} has the same name; uninstall one of them"
            )
    return points


@cache
def _section_of_package(group: Group, kind: str) -> type[Derived]:
    """Return the section of a registered kind; raises `ConfigurationError` if it cannot be one."""
    point = _registered(group.name)[kind]
    try:
        cls: Any = point.load()
        _check_class(cls, group, kind)
        return section_of(cls, group.base, kind, provider=_distribution_of(point))
    except Exception as error:  # its module may raise anything
        reason = str(error) if isinstance(error, ConfigurationError) else repr(error)
        if isinstance(error, PydanticUserError):
            reason = "one of its fields has a type that YAML cannot represent"
        text = shown(reason, LONGEST_REASON)
        raise ConfigurationError(f"{_origin(point)}: cannot be used: {text}") from error


def _check_class(cls: Any, group: Group, kind: str) -> None:
    is_class = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    if not is_class or not cls.__dataclass_params__.frozen:
        raise ConfigurationError(f"{quoted(cls, 80)}, expected a frozen dataclass")
    for name in {field.name for field in dataclasses.fields(cls)} & set(dir(group.base)):
        raise ConfigurationError(f"a section cannot have the key {name!r}")
    if not issubclass(cls, group.parent):
        raise ConfigurationError(f"{cls.__name__} is not derived from {group.parent.__name__}")
    for name in group.own_parts:
        if getattr(cls, name, None) is getattr(group.parent, name, None):
            raise ConfigurationError(f"{cls.__name__} must define its own {name}")
    if "kind" in group.own_parts and cls.kind != kind:
        raise ConfigurationError(f"the kind of {cls.__name__} is {cls.kind!r}, expected {kind!r}")
    if group.name in GROUPS:  # such classes are stored with checkpoints
        for field in dataclasses.fields(cls):
            if field.kw_only or not field.init:
                raise ConfigurationError(
                    f"the field {field.name!r} is keyword-only, but the manifest of checkpoints "
                    "stores fields by position"
                )
        message(cls)


def _origin(point: EntryPoint) -> str:
    package = " ".join(_distribution_of(point))
    return f"{package}, entry point {point.group}: {point.name} = {point.value}"


def _distribution_of(point: EntryPoint) -> tuple[str, str]:
    assert point.dist is not None, "it was found in one"
    return point.dist.name, point.dist.version
