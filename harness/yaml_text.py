"""YAML as the project reads it: safe, and a key that stands twice in a mapping is an error instead of the last one."""

from __future__ import annotations

from typing import Any

import yaml


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML's safe loader, which by itself lets the last of equal keys win."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        name = f"{key.tag} {key.value}"
        if isinstance(key, yaml.ScalarNode) and name in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key.value} stands twice", key.start_mark)
        seen.add(name)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse(text: str) -> Any:
    """The document; yaml.YAMLError (with `problem` and `problem_mark`) for what is not YAML or says a key twice."""
    return yaml.load(text, _UniqueKeys)  # a safe loader: plain data only
