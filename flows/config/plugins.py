"""Kinds of sections that installed packages register by entry points, beside those of dps.

A package registers ``name = "package.module:Class"`` in a group such as ``dps.rules``; then a
section with ``kind: name`` is checked like any other, with the fields of the class, a frozen
dataclass, as its keys. Nothing is looked up before a kind is named that is none of dps's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    BaseModel,
    Field,
    GetCoreSchemaHandler,
    PydanticUserError,
    ValidationInfo,
    create_model,
)
from pydantic_core import CoreSchema, core_schema

from dps.errors import ConfigurationError
from dps.protocol.wire import message
from flows.config.errors import refuse, refusing, suggest
from flows.quoting import quoted, shown

if TYPE_CHECKING:
    from pydantic import SerializerFunctionWrapHandler

LONGEST_REASON = 300


class Registered:
    """What a section has whose kind is registered; mixed into the section of its group.

    Attributes
    ----------
    registered_class
        The class that is registered.
    registered_in
        The group that it is registered in.
    registered_by
        Name and version of the distribution that provides it.
    """

    registered_class: ClassVar[type]
    registered_in: ClassVar[Group]
    registered_by: ClassVar[tuple[str, str]]

    def made(self, **given: Any) -> Any:
        """Return an object of the class, with these settings and what dps gives it.

        Raises
        ------
        ConfigurationError
            The class refuses them.
        """
        names = (field.name for field in dataclasses.fields(self.registered_class) if field.init)
        settings = {
            name: getattr(self, name) for name in names if name not in self.registered_in.given
        }
        try:
            return self.registered_class(**settings, **given)
        except ConfigurationError:
            raise
        except Exception as error:
            reason = shown(f"{self.registered_class.__name__}: {error}", LONGEST_REASON)
            raise ConfigurationError(reason) from error

    def check_settings(self) -> None:
        """Refuse settings that the class refuses; raises `ConfigurationError`."""
        self.made()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # By its kind: the class of the section itself is made anew in each process.
        assert isinstance(self, BaseModel)
        return self.registered_in.section_from, (self.model_dump(exclude_unset=True),)


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of entry points whose kinds the annotated sections may have, beside their own.

    Used as an annotation of a union of sections that is discriminated by `kind`.

    Attributes
    ----------
    name
        Of the group.
    base
        The section that those of registered kinds are derived from; its fields are keys of each.
    needed
        The attributes that a class must have.
    given
        The fields of a class that are no settings: dps says what they are.
    on_wire
        Whether objects of the class are written beside checkpoints.
    objection
        Says what else is wrong with a class that is registered by a name, if anything is.
    """

    name: str
    base: type[Any]
    needed: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    on_wire: bool = False
    objection: Callable[[str, type], str | None] | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        own = tuple(kind for section in get_args(source) for kind in _kinds_of(section))

        def validate(
            data: Any, inner: core_schema.ValidatorFunctionWrapHandler, info: ValidationInfo
        ) -> Any:
            if isinstance(data, self.base):
                return data
            kind = data.get("kind") if isinstance(data, dict) else None
            if not isinstance(kind, str) or kind in own:
                return inner(data)
            return self._section(data, kind, own, info)

        def serialise(section: Any, inner: SerializerFunctionWrapHandler) -> Any:
            return inner(section)

        return core_schema.with_info_wrap_validator_function(
            validate,
            handler(source),
            # By the class that a section is of, whatever the union knows.
            serialization=core_schema.wrap_serializer_function_ser_schema(
                serialise, schema=core_schema.any_schema()
            ),
        )

    def section_from(self, data: Mapping[str, Any]) -> Any:
        """Return the section of a registered kind that `data` says."""
        return _section_of(self, data["kind"]).model_validate(data)

    def _section(
        self, data: Mapping[str, Any], kind: str, own: Sequence[str], info: ValidationInfo
    ) -> Any:
        with refusing("kind"):
            registered = _registered(self.name)
            _must_be_free(registered, own)
            if kind not in registered:
                known = [*own, *registered]
                refuse(f"unknown kind {quoted(kind)}; {suggest(kind, known)}", key="kind")
            section = _section_of(self, kind)
        made = section.model_validate(data, context=info.context)
        with refusing():
            made.check_settings()
        return made


def sections_in(value: Any) -> Iterator[Registered]:
    """Yield the sections of registered kinds in a configuration, or in a part of it."""
    if isinstance(value, Registered):
        yield value
    if isinstance(value, BaseModel):
        value = [getattr(value, name) for name in type(value).model_fields]
    elif isinstance(value, Mapping):
        value = list(value.values())
    for part in value if isinstance(value, list | tuple) else ():
        yield from sections_in(part)


def distributions(config: Any) -> dict[str, str]:
    """Return the distributions that provide kinds of a configuration, each with its version."""
    return dict(sorted({section.registered_by for section in sections_in(config)}))


def modules(config: Any) -> tuple[str, ...]:
    """Return the modules that the registered kinds of a configuration are in."""
    return tuple(sorted({section.registered_class.__module__ for section in sections_in(config)}))


# -- parts -----------------------------------------------------------------------------------------


@cache
def _registered(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; raises `ConfigurationError` if two have the same."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        other = found.setdefault(point.name, point)
        if other != point:
            raise ConfigurationError(
                f"{_told(point)}: its name is taken, by {_told(other)}; uninstall one of them"
            )
    return found


def _must_be_free(registered: Mapping[str, EntryPoint], own: Collection[str]) -> None:
    for name, point in registered.items():
        if name in own:
            raise ConfigurationError(f"{_told(point)}: dps has a kind of this name itself")


@cache
def _section_of(group: Group, kind: str) -> Any:
    """The section for a registered kind; raises `ConfigurationError` if its class cannot be one."""
    point = _registered(group.name)[kind]
    cls = _loaded(point, group)
    try:
        fields = {"kind": (Literal[kind], ...), **_settings(cls, group)}
        section: Any = create_model(f"{cls.__name__}Section", __base__=group.base, **fields)
    except (NameError, TypeError) as error:
        reason = shown(str(error), LONGEST_REASON)
        raise ConfigurationError(
            f"{_told(point)}: a type of its fields is wrong: {reason}"
        ) from error
    except PydanticUserError as error:
        names = ", ".join(field.name for field in dataclasses.fields(cls))
        raise ConfigurationError(
            f"{_told(point)}: one of its fields ({names}) has a type that YAML cannot give"
        ) from error
    section.registered_class, section.registered_in = cls, group
    section.registered_by = _distribution_of(point)
    return section


def _loaded(point: EntryPoint, group: Group) -> type:
    place = _told(point)
    try:
        cls: Any = point.load()
    except Exception as error:
        reason = shown(f"{type(error).__name__}: {error}", LONGEST_REASON)
        raise ConfigurationError(f"{place}: cannot be imported: {reason}") from error
    is_class = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    if not is_class or not cls.__dataclass_params__.frozen:
        raise ConfigurationError(f"{place}: is {shown(repr(cls), 80)}, expected a frozen dataclass")
    fields = {field.name for field in dataclasses.fields(cls)}
    for name in group.needed:
        if not hasattr(cls, name) and name not in fields:
            raise ConfigurationError(f"{place}: {cls.__name__} has no {name!r}, which it needs")
    for name in group.given:
        if name not in fields:
            raise ConfigurationError(f"{place}: {cls.__name__} needs a field {name!r}")
    for name in sorted(fields.difference(group.given)):
        if name == "kind" or hasattr(group.base, name) or name in group.base.model_fields:
            raise ConfigurationError(
                f"{place}: a section cannot have the key {name!r}; call that field otherwise"
            )
    wrong = group.objection(point.name, cls) if group.objection is not None else None
    if wrong is not None:
        raise ConfigurationError(f"{place}: {cls.__name__} {wrong}")
    if group.on_wire:
        for field in dataclasses.fields(cls):
            if field.kw_only or not field.init:
                raise ConfigurationError(
                    f"{place}: the field {field.name!r} cannot be given by its position, as what "
                    "is written beside checkpoints gives it"
                )
        try:
            message(cls)
        except ConfigurationError as error:
            raise ConfigurationError(f"{place}: {error}") from error
    found: type = cls
    return found


def _settings(cls: Any, group: Group) -> dict[str, Any]:
    """The fields of a class as those of a section."""
    hints = get_type_hints(cls, include_extras=True)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if not field.init or field.name in group.given:
            continue
        default: Any = ...
        if field.default_factory is not dataclasses.MISSING:
            default = Field(default_factory=field.default_factory)
        elif field.default is not dataclasses.MISSING:
            default = field.default
        found[field.name] = (_as_written(hints[field.name]), default)
    return found


def _as_written(hint: Any) -> Any:
    """The type of a setting as YAML can give it: lists stand for tuples, all else is exact."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        inner = tuple(arg if arg is Ellipsis else _as_written(arg) for arg in args)
        return Annotated[tuple[inner], Field(strict=False)]  # type: ignore[valid-type]
    if origin in (Union, UnionType):
        return Union[tuple(map(_as_written, args))]  # noqa: UP007 - of types that are computed
    return hint


def _kinds_of(section: Any) -> tuple[str, ...]:
    kinds: tuple[str, ...] = get_args(section.model_fields["kind"].annotation)
    return kinds


def _told(point: EntryPoint) -> str:
    """Name an entry point and the distribution that it is of."""
    package = " ".join(_distribution_of(point))
    return f"{package}, entry point {point.group}: {point.name} = {point.value}"


def _distribution_of(point: EntryPoint) -> tuple[str, str]:
    assert point.dist is not None, "it was found in one"
    return point.dist.name, point.dist.version
