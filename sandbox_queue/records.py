"""What all types that cross the wire have in common: names, immutability, validation, pydantic.

Python says `timeout`, the wire says `timeoutSeconds`; both are declared once, on the field. A field's description tells
what to give, so it serves three readers: the code, the JSON Schema, and whoever gets the error message.
"""

from __future__ import annotations

import difflib
import re
from collections import abc
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, get_args

import msgspec

from sandbox_queue.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

SHOWN_MAX = 80


class FrozenDict(dict[str, Any]):
    """A dict that a frozen record can hold: it refuses changes and has a hash."""

    def __hash__(self) -> int:  # type: ignore[override]  # dict says None; this one cannot change
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:  # pickle and deepcopy would fill it item by item
        return FrozenDict, (dict(self),)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this mapping belongs to an immutable record: make a new record instead")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse  # pyright: ignore[reportAssignmentType]  # each refuses, whatever it is given


EMPTY = FrozenDict()  # the default of mappings: msgspec leaves a default out by identity


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of the wire types. Build one with its constructors or `from_dict`: they validate, plain calls do not."""

    invalid: ClassVar[type[InvalidInput]] = InvalidInput
    secret: ClassVar[frozenset[str]] = frozenset()  # mappings whose values `repr` must not show

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is dict:
                msgspec.structs.force_setattr(self, name, FrozenDict(value) if value else EMPTY)

    def __repr__(self) -> str:
        shown = []
        for info in msgspec.structs.fields(self):
            value = getattr(self, info.name)
            default = info.default if info.default_factory is msgspec.NODEFAULT else info.default_factory()
            if value != default:
                shown.append(f"{info.name}={self._show(info.name, value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def _show(self, name: str, value: object) -> str:
        if name in self.secret and isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: …" for key in value) + "}"
        text = repr(value)
        return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 1]}… ({len(text)} characters)"

    def to_dict(self) -> dict[str, Any]:
        """The record as it stands on the wire: JSON types, camelCase."""
        data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))  # to_builtins would leave tuples
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build from wire names.

        Raises:
            InvalidInput: the subclass that belongs to this record, naming the field.
        """
        if not isinstance(data, abc.Mapping):
            raise cls.invalid(cls.__name__, f"is of type {type(data).__name__}", "give an object with its fields")
        record: Self = _convert(cls, dict(data), names="wire")
        return record

    @classmethod
    def build(cls, **values: Any) -> Self:
        """Build from Python names, validating as the wire would; None means the default."""
        wire = dict(zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True))
        record: Self = _convert(cls, {wire.get(k, k): v for k, v in values.items() if v is not None}, names="python")
        return record

    @classmethod
    def _wire_type(cls) -> Any:
        """What to decode for this class; a base of a tagged union answers with the union."""
        return cls

    @classmethod
    def _wire_class(cls, data: Any) -> type[Record]:
        """The class that `data` means to be, for naming its fields in an error."""
        return cls

    @classmethod
    def _known_tags(cls) -> str:
        """Where this is a tagged union: a sentence that lists its members."""
        return ""

    # pydantic and FastAPI, should the user have them; neither is imported by us

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema  # the worker never comes here: it must not pay for pydantic

        def validate(value: object) -> Record:
            if isinstance(value, cls):
                return value
            if isinstance(value, dict):
                return cls.from_dict(value)
            raise ValueError(f"expected a {cls.__name__} or its dict, got {type(value).__name__}")

        return core_schema.no_info_plain_validator_function(
            validate, serialization=core_schema.plain_serializer_function_ser_schema(cls.to_dict)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
        (schema,), definitions = msgspec.json.schema_components([cls._wire_type()], ref_template="{name}")
        return _inline(schema, definitions)


def explain(error: msgspec.ValidationError, record: type[Record], data: Any, names: str = "wire") -> InvalidInput:
    """Turn msgspec's message into one that names the field, the problem and what to give instead."""
    if isinstance(error.__cause__, InvalidInput):
        cause = error.__cause__
        wire = {f.name: f.encode_name for f in msgspec.structs.fields(record)} if names == "wire" else {}
        return type(cause)(wire.get(cause.field, cause.field), cause.problem, cause.remedy)
    problem, _, where = str(error).replace("`key` in ", "").partition(" - at `$")
    path = re.findall(r"[^.\[\]`]+", where)
    field = path[0] if path else ""
    info = next((f for f in msgspec.structs.fields(record) if f.encode_name == field), None)
    if unknown := re.search(r"unknown field `([^`]*)`", problem):
        return _unknown(record, unknown[1], names)
    if missing := re.search(r"missing required field `([^`]*)`", problem):
        return record.invalid(missing[1], "is missing", f"every {record.__name__} needs it")
    problem = re.sub(r"^Expected `str` matching regex .*", "does not fit", problem)
    problem = problem[0].lower() + problem[1:]
    if info is None:
        return record.invalid(field or record.__name__, problem, record._known_tags() or "see the JSON Schema")
    value = data.get(field) if isinstance(data, dict) else None
    if info.name not in record.secret and ", got " not in problem:
        problem = f"{problem}, got {_clip(value)}"
    return record.invalid(info.name if names == "python" else info.encode_name, problem, _describe(info))


def _convert(record: type[Record], data: dict[str, Any], names: str) -> Any:
    try:
        builtin = (bytes,) if names == "python" else None  # on the wire, bytes are base64
        return msgspec.convert(data, record._wire_type(), builtin_types=builtin)
    except msgspec.ValidationError as error:
        raise explain(error, record._wire_class(data), data, names) from None


def _unknown(record: type[Record], field: str, names: str) -> InvalidInput:
    known = [f.name if names == "python" else f.encode_name for f in msgspec.structs.fields(record)]
    close = difflib.get_close_matches(field, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(known)}"
    return record.invalid(field[:SHOWN_MAX], f"is not a field of {record.__name__}", hint)


def _describe(info: msgspec.structs.FieldInfo) -> str:
    for part in (info.type, *get_args(info.type)):  # X, or the X of X | None
        for meta in getattr(part, "__metadata__", ()):
            if meta.description:
                return f"give {meta.description}"
    return "see the JSON Schema"


def _clip(value: object) -> str:
    text = repr(value) if not isinstance(value, (str, bytes)) else repr(value[:SHOWN_MAX])
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 1] + "…"


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """Replace references by what they name: a pydantic model of the user's has no place for our definitions."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inline(definitions[schema["$ref"]], definitions)
        return {k: _inline(v, definitions) for k, v in schema.items() if k != "discriminator"}
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    return schema
