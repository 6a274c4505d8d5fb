"""Write what is derived from the code: `schemas/*.json` from the wire types, `docs/settings.md` from the settings.

Run by `make generate`; a test fails when a committed file is not what this would write.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec
from pydantic import AliasChoices, SecretStr
from pydantic.fields import FieldInfo

from sandbox_queue.models import AnyStep, SandboxSpec, Step, StepResult
from sandbox_queue.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parent.parent
DIALECT = "https://json-schema.org/draft/2020-12/schema"

SCHEMAS: dict[str, tuple[Any, type[msgspec.Struct]]] = {
    "schemas/step.json": (AnyStep, Step),
    "schemas/step-result.json": (StepResult, StepResult),
    "schemas/sandbox-spec.json": (SandboxSpec, SandboxSpec),
}

SETTINGS_INTRODUCTION = """\
# Settings

Read from the environment by the service and the launcher; an empty variable counts as unset. In code they are the fields
of `sandbox_queue.settings.Settings`, with the names below in lower case and without the prefix.

Made from `sandbox_queue/settings.py` by `make generate`: change it there.
"""


def main() -> None:
    for name, text in generated().items():
        path = ROOT / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"wrote {name}")


def generated() -> dict[str, str]:
    """Every derived file: its path from the root, and its content."""
    files = {name: schema(wire_type, documented) for name, (wire_type, documented) in SCHEMAS.items()}
    return {**files, "docs/settings.md": settings_page()}


def schema(wire_type: Any, documented: type[msgspec.Struct]) -> str:
    """The JSON Schema of a type as it stands on the wire."""
    body = msgspec.json.schema(wire_type)
    body.pop("discriminator", None)  # OpenAPI's, not JSON Schema's: strict validators refuse it
    for definition in body["$defs"].values():
        definition["description"] = summary(definition["description"])
    head = {"$schema": DIALECT, "title": documented.__name__, "description": summary(documented.__doc__ or "")}
    return json.dumps({**head, **body}, indent=2, ensure_ascii=False) + "\n"


def summary(docstring: str) -> str:
    """Its first paragraph on one line; what follows is for readers of the code."""
    return " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())


def settings_page() -> str:
    sections = [section(name, field) for name, field in Settings.model_fields.items()]
    return "\n".join([SETTINGS_INTRODUCTION, *sections])


def section(name: str, field: FieldInfo) -> str:
    default = (
        "none"
        if field.default is None
        else f"`{field.default:g}`"
        if isinstance(field.default, float)
        else f"`{field.default}`"
    )
    text = " ".join(inspect.cleandoc(field.description or "").split())
    return f"## {variables(name, field)}\n\n{kind(field.annotation)}; default {default}\n\n{text}\n"


def variables(name: str, field: FieldInfo) -> str:
    """The names under which the environment may give it, the first one winning."""
    alias = field.validation_alias
    names = [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [PREFIX + name.upper()]
    return " or ".join(f"`{name}`" for name in names)


def kind(annotation: Any) -> str:
    """A type in the words of whoever writes an environment file."""
    members = [member for member in get_args(annotation) if member is not NoneType]
    if get_origin(annotation) is Literal:
        return "One of " + ", ".join(f"`{member}`" for member in members)
    if members:
        return kind(members[0])
    return {str: "Text", SecretStr: "Text, secret", float: "Number", int: "Whole number", bool: "`true` or `false`"}[annotation]


if __name__ == "__main__":
    main()
