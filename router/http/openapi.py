"""GET /openapi.json: what bodies may hold, drawn from the table of fields in `fields`.

OpenAPI 3.1. Each reader says what values it takes; ranges that depend on the model or on other
fields are not described, and refused with the field's name. Pure.
"""

from collections.abc import Mapping

from router.http.fields import CHAT, MESSAGE, PART, STREAM_OPTIONS, TEXT
from router.http.logprobs import Json
from router.http.readers import (
    MAX_TOP_K,
    MAX_WHOLE,
    Neutral,
    Read,
    count,
    flag,
    ignored,
    logit_bias,
    number,
    prompt,
    strings,
    text,
    token_ids,
    top_k,
    whole,
)

PATH = "/openapi.json"
JSON_MEDIA = "application/json"

_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_BY_READER: dict[Read, Json] = {
    text: {"type": "string"},
    whole: {"type": "integer", "minimum": -MAX_WHOLE, "maximum": MAX_WHOLE},
    count: {"type": "integer", "minimum": 0, "maximum": MAX_TOP_K},
    top_k: {"type": "integer", "minimum": -1, "maximum": MAX_TOP_K},
    number: {"type": "number"},
    flag: {"type": "boolean"},
    strings: {"type": ["string", "array"], "items": {"type": "string"}},
    token_ids: _IDS,
    prompt: {"anyOf": [{"type": "string"}, _IDS]},
    logit_bias: {"type": "object", "additionalProperties": {"type": "number"}},
    ignored: {},
}


def description(version: str) -> Json:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "twophase, OpenAI-compatible", "version": version},
        "paths": {
            "/v1/completions": {"post": _generating("Continues a text.", TEXT, "prompt")},
            "/v1/chat/completions": {"post": _generating("Answers a chat.", CHAT, "messages")},
            "/v1/models": {"get": _operation("The model that is served.")},
            "/health": {"get": _operation("The process is alive.")},
            "/ready": {"get": _operation("A token can flow through both pools.", 503)},
        },
    }


def _generating(summary: str, table: Mapping[str, Read], required: str) -> Json:
    body = {"required": True, "content": {JSON_MEDIA: {"schema": _object(table, required)}}}
    statuses = (400, 401, 404, 408, 413, 415, 429, 503, 504)
    return _operation(summary, *statuses) | {"requestBody": body}


def _operation(summary: str, *errors: int) -> Json:
    told = {"content": {JSON_MEDIA: {"schema": {"type": "object"}}}}
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    responses: Json = {"200": {"description": "OK", "content": told["content"] | stream}}
    responses |= {str(status): {"description": "An error.", **told} for status in errors}
    return {"summary": summary, "responses": responses}


def _object(table: Mapping[str, Read], *required: str) -> Json:
    return {
        "type": "object",
        "properties": {name: _value(name, read) for name, read in table.items()},
        "required": list(required),
        "additionalProperties": False,
    }


def _value(name: str, read: Read) -> Json:
    """What a field may hold; a reader that is not described may take anything."""
    if isinstance(read, Neutral):
        return {"enum": [None, *read.values]}
    if name == "messages":
        return {"type": "array", "items": _object(MESSAGE, "role", "content")}
    if name == "content":
        parts = {"type": "array", "items": _object(PART, "type", "text")}
        return {"anyOf": [{"type": "string"}, parts]}
    if name == "stream_options":
        return _object(STREAM_OPTIONS)
    return _BY_READER.get(read, {})
