"""Constraints as they come over HTTP: OpenAI's response_format, vLLM's structured_outputs.

Both become the one Constraint that the router knows; whether it can be used is checked there.
"""

import json
import re
from collections.abc import Mapping

import pydantic_core

from core.errors import InvalidRequest
from core.sampling import Constraint, ConstraintKind
from router.http.readers import shown, strings, text

ANY_OBJECT = '{"type":"object"}'


def response_format(name: str, value: object) -> Constraint | None:
    """{"type": "text" | "json_object"}, or "json_schema" with its schema; strict or not is one."""
    found = _object(name, value)
    match found.get("type"):
        case "text":
            return None
        case "json_object":
            return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT)
        case "json_schema":
            inner = _object(f"{name}.json_schema", found.get("json_schema"))
            return _schema(f"{name}.json_schema.schema", inner.get("schema"))
    limit = "must be text, json_object or json_schema"
    raise InvalidRequest(f"{name}.type", shown(found.get("type")), limit)


def structured_outputs(name: str, value: object) -> Constraint | None:
    """Exactly one of json, json_object, regex, choice, grammar (Lark)."""
    given = {key: entry for key, entry in _object(name, value).items() if entry is not None}
    if len(given) != 1:
        raise InvalidRequest(name, shown(sorted(given)), "must hold exactly one constraint")
    [(key, entry)] = given.items()
    field = f"{name}.{key}"
    match key:
        case "json":
            return _schema(field, _parsed(field, entry) if isinstance(entry, str) else entry)
        case "json_object":
            return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT) if entry is True else None
        case "regex":
            return Constraint(ConstraintKind.REGEX, text(field, entry))
        case "choice":
            words = "|".join(re.escape(word) for word in strings(field, entry))
            return Constraint(ConstraintKind.REGEX, f"(?:{words})")
        case "grammar":
            return Constraint(ConstraintKind.LARK, text(field, entry))
    raise InvalidRequest(field, "unknown", "must be json, json_object, regex, choice or grammar")


def _schema(name: str, value: object) -> Constraint:
    if not isinstance(value, dict | bool):
        raise InvalidRequest(name, shown(value), "must be a JSON schema")
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


def _parsed(name: str, value: str) -> object:
    try:
        return pydantic_core.from_json(value, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(name, shown(value), f"is no JSON: {error}") from error


def _object(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidRequest(name, shown(value), "must be an object")
    return value
