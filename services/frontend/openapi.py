"""The description of every route at /openapi.json, made from the declarations of the bodies.

OpenAPI 3.2, whose ``itemSchema`` says what the events of a stream are
(https://spec.openapis.org/oas/v3.2.0). A schema refuses what the server refuses of an object by
itself; what holds between two fields, or depends on the model, stands in no schema.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

import msgspec

from penstock import __version__
from penstock.protocol.declared import (
    Declared,
    SameAs,
    description_of,
    fields_of,
    required,
    unwrapped,
)
from penstock.services.frontend.bodies.routes import (
    EVENT_STREAM,
    JSON,
    RouteBodies,
    structs_of,
)

VERSION = "3.2.0"
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")
_ALWAYS = {
    400: "The request is wrong; the message says what, and what is allowed.",
    403: "The page of another origin asks, or a local server by a foreign name.",
    408: "The body did not come in time.",
    500: "A fault of the server.",
    503: "The server is not ready, full, or going down; Retry-After says when to try again.",
}
_WITH_KEY = {401: "The key is missing or wrong."}
_WITH_NAME = {404: "There is no such model."}
_WITH_BODY = {
    413: "The body is larger than --max-body-bytes.",
    415: "The request does not say that its body is JSON.",
    429: "The caller has its share of the queue; Retry-After says when to try again.",
    504: "The request took longer than its time.",
}
_NEUTRAL = "Not supported. What is listed asks for nothing and is accepted."
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def describe(
    routes: Sequence[RouteBodies], open_paths: Collection[str], *, with_keys: bool
) -> dict[str, Any]:
    """The whole description. open_paths: those that need no key. with_keys: the others need one."""
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        is_open = route.path in open_paths or not with_keys
        operation = _operation(route, schemas, is_open=is_open)
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = operation
    components: dict[str, Any] = {
        "schemas": schemas.components,
        "headers": {"RequestId": _REQUEST_ID},
    }
    found: dict[str, Any] = {
        "openapi": VERSION,
        "info": {
            "title": "Penstock",
            "version": __version__,
            "description": "What each route takes and gives. docs/api.md says what it means.",
        },
        "paths": paths,
        "components": components,
    }
    if with_keys:
        components["securitySchemes"] = _KEYS
        found["security"] = [{name: []} for name in _KEYS]
    return found


_REQUEST_ID = {
    "description": "The request's id: the client's own x-request-id where it is harmless.",
    "schema": {"type": "string"},
}


def _operation(route: RouteBodies, schemas: _Schemas, *, is_open: bool) -> dict[str, Any]:
    name = _PARAMETER.sub(r"\1", route.path).strip("/") or "index"
    words = re.sub(r"\W+", "_", f"{route.method.lower()}_{name}")
    found: dict[str, Any] = {"operationId": words, "summary": route.summary, "tags": [route.group]}
    parameters: list[dict[str, Any]] = [
        {"name": one, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for one in _PARAMETER.findall(route.path)
    ]
    parameters += [
        {"name": one, "in": "query", "description": said, "schema": {"type": "string"}}
        for one, said in route.query.items()
    ]
    if parameters:
        found["parameters"] = parameters
    if route.method == "POST":
        schema = {"type": "object"} if route.takes is None else schemas.of(route.takes)
        found["requestBody"] = {
            "required": route.takes is not None,
            "content": {JSON: {"schema": schema}},
        }
    if route.messages is not None:
        sent, got = route.messages
        found["x-messages"] = {"from_client": schemas.of(sent), "from_server": schemas.of(got)}
    if is_open:
        found["security"] = []
    found["responses"] = _responses(route, schemas, is_open=is_open)
    return found


def _responses(route: RouteBodies, schemas: _Schemas, *, is_open: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if route.upgrades:
        found["101"] = {"description": "The connection is a WebSocket from here on."}
    else:
        found["200"] = _response("The answer.", _contents(route, schemas))
    for status, gives in route.others.items():
        found[str(status)] = _response("Another answer.", {JSON: {"schema": schemas.of(gives)}})
    errors = dict(_ALWAYS)
    if not is_open:
        errors |= _WITH_KEY
    if route.query or _PARAMETER.search(route.path) or route.method == "POST":
        errors |= _WITH_NAME
    if route.method == "POST":
        errors |= _WITH_BODY
    content = {JSON: {"schema": schemas.of(route.fails)}}
    for status, said in sorted(errors.items()):
        found.setdefault(str(status), _response(said, content))
    return found


def _response(description: str, content: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}
    return {"description": description, "headers": headers, "content": content}


def _contents(route: RouteBodies, schemas: _Schemas) -> dict[str, Any]:
    """The answer by its media type, and the stream by its own."""
    found: dict[str, Any] = {}
    if route.gives is not None:
        schema = schemas.of(route.gives)
        if route.or_gives:
            schema = {"anyOf": [schema, *map(schemas.of, route.or_gives)]}
        found[route.media_type] = {"schema": schema}
    elif route.streams is None:
        found[route.media_type] = {"schema": {"type": "string"}}
    if route.streams is not None:
        item: dict[str, Any] = {"anyOf": [schemas.of(route.streams), schemas.of(route.fails)]}
        if route.stream_type == EVENT_STREAM:
            data = {
                "type": "string",
                "contentMediaType": JSON,
                "contentSchema": item,
                "description": "JSON, or [DONE] at the end of OpenAI's streams.",
            }
            item = {"type": "object", "properties": {"data": data}}
        found[route.stream_type] = {"itemSchema": item}
    return found


class _Schemas:
    """The schemas of all bodies, each once."""

    def __init__(self, routes: Sequence[RouteBodies]) -> None:
        bodies = list(dict.fromkeys(structs_of(routes)))
        objects = list(dict.fromkeys(_reached(bodies)))
        asked, components = msgspec.json.schema_components([*bodies, *objects], ref_template=_REF)
        _walk(asked)
        _walk(components)
        self._of = dict(zip([*bodies, *objects], asked, strict=True))
        self.components = {_short(name): schema for name, schema in components.items()}
        for of in objects:
            schema = self.components[self._of[of]["$ref"].rpartition("/")[2]]
            _explain(schema, of)
            if issubclass(of, Declared):
                _complete(schema, of)

    def of(self, body: Any) -> dict[str, Any]:
        return self._of[body]


def _reached(types: Iterable[Any]) -> Iterable[type[msgspec.Struct]]:
    """The structs in these types, and in their fields."""
    seen: set[Any] = set()
    waiting = list(types)
    while waiting:
        base, _ = unwrapped(waiting.pop())
        if isinstance(base, type) and issubclass(base, msgspec.Struct):
            if base not in seen:
                seen.add(base)
                waiting += fields_of(base).values()
                yield base
        else:
            waiting += [one for one in get_args(base) if not isinstance(one, str | int)]


def _short(name: str) -> str:
    """Two structs of one name have those of their modules before it."""
    return ".".join(name.rsplit(".", 2)[-2:])


def _walk(schema: Any) -> None:
    """Write what Python writes otherwise as JSON Schema has it, and names short."""
    if isinstance(schema, dict):
        pattern, reference = schema.get("pattern"), schema.get("$ref")
        if isinstance(pattern, str):
            schema["pattern"] = pattern.replace(r"\Z", "$")
        if isinstance(reference, str):
            schema["$ref"] = _REF.format(name=_short(reference.rpartition("/")[2]))
        for value in schema.values():
            _walk(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            _walk(value)


def _explain(schema: dict[str, Any], of: type[msgspec.Struct]) -> None:
    """Say of each field as a whole what is said of one of its types."""
    for name, field in fields_of(of).items():
        if name in schema.get("properties", {}) and (said := description_of(field)):
            schema["properties"][name].setdefault("description", said)


def _complete(schema: dict[str, Any], of: type[Declared]) -> None:
    """Add what an object accepts beside its fields: null for left out, and values of parameters
    that are not supported which ask for nothing."""
    schema["additionalProperties"] = {"type": "null"}  # an unknown name, left out
    properties = schema.setdefault("properties", {})
    for name in properties.keys() - required(of):
        properties[name] = _or(properties[name], {"type": "null"})
    for name, neutral in of.NEUTRAL.items():
        accepted = _neutral(neutral)
        if name in properties:
            properties[name] = _or(properties[name], {"enum": accepted})
            continue
        said = (
            f"{_NEUTRAL} So is the value of {neutral.name}."
            if isinstance(neutral, SameAs)
            else _NEUTRAL
        )
        properties[name] = {"enum": [*accepted, None], "description": said}


def _neutral(neutral: tuple[Any, ...] | SameAs) -> list[Any]:
    return [neutral.default] if isinstance(neutral, SameAs) else list(neutral)


def _or(schema: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Either of them."""
    branches = schema.get("anyOf")
    if branches is None:
        kept = ("description", "default")
        said: dict[str, Any] = {name: schema[name] for name in kept if name in schema}
        rest = {name: value for name, value in schema.items() if name not in said}
        return {"anyOf": [rest, other], **said}
    return schema if other in branches else {**schema, "anyOf": [*branches, other]}
