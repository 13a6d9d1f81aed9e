"""A YAML file as a tree, overrides of its keys, and errors that name path, nearest key and line.

Knows no section: the schema is given.
"""

import difflib
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from core.errors import ConfigError

# ValueError: no UTF-8, or what only looks like a date (2024-99-99).
_NOT_YAML = (yaml.YAMLError, ValueError)


def read_tree(path: Path) -> dict[str, Any]:  # Any: untyped until pydantic has seen it
    """The keys and values of the file; raises ConfigError where it holds none."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from error
    except _NOT_YAML as error:
        raise ConfigError(str(path), f"is not YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(str(path), "must hold keys and values at its top")
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:  # Any: as in read_tree
    """Put `key=value`, its key dotted, into the tree."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(override or "override", "an override is written key=value")
    *parents, last = key.split(".")
    for parent in parents:
        child = tree.get(parent) or {}
        if not isinstance(child, dict):
            raise ConfigError(key, f"{parent} holds no keys")
        # A copy: an alias in the file makes two sections one object.
        tree[parent] = tree = dict(child)
    try:
        tree[last] = yaml.safe_load(text)
    except _NOT_YAML as error:
        raise ConfigError(key, f"{text!r} is not a YAML value") from error


def errors_of(error: ValidationError, schema: type[BaseModel]) -> list[ConfigError]:
    """Each thing that pydantic found, in the product's own words."""
    return [_error_of(found, schema) for found in error.errors()]


def line_of(text: str, path: str) -> int | None:
    """The line, from 1, where the dotted path begins in this YAML; of its nearest parent if absent.

    None where not even the first key is there.
    """
    node, line = yaml.compose(text, Loader=yaml.SafeLoader), None
    for part in path.split("."):
        if isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
            continue
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((key, value) for key, value in pairs if key.value == part), None)
        if found is None:
            return line
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def _error_of(found: Any, schema: type[BaseModel]) -> ConfigError:  # Any: pydantic's ErrorDetails
    path = ".".join(str(part) for part in found["loc"]) or "configuration"
    if found["type"] == "extra_forbidden":
        known = _known_keys(found["loc"][:-1], schema)
        nearest = difflib.get_close_matches(str(found["loc"][-1]), known, n=1)
        return ConfigError(path, "is not a known key", nearest[0] if nearest else None)
    problem = found["msg"].removeprefix("Value error, ")
    # What stands in place of the name of a secret may be the secret itself.
    if found["type"] != "value_error" and "security" not in found["loc"]:
        problem = f"{problem} (got {found['input']!r})"
    return ConfigError(path, problem)


def _known_keys(path: tuple[int | str, ...], schema: type[BaseModel]) -> list[str]:
    for part in path:
        annotation = schema.model_fields[str(part)].annotation
        kinds = [k for k in (get_args(annotation) or (annotation,)) if isinstance(k, type)]
        schema = next(kind for kind in kinds if issubclass(kind, BaseModel))
    return list(schema.model_fields)
