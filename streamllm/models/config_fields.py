"""The fields of a JSON config, read with their types."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamllm.errors import ModelLoadError

REQUIRED: Any = object()
"""As a default: the field must be there."""
_LONGEST_VALUE = 80
"""Characters of a value that a message shows."""


class ConfigFields:
    """A JSON object whose fields are read with their types; a wrong one names itself.

    Attributes:
        path: of the file, for messages.
        values: the fields as they are.
        aliases: older names that a family's files use: ``{"hidden_size": "n_embd"}``.
    """

    def __init__(self, path: Path, values: dict[str, Any], aliases: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.values = values
        self.aliases = aliases or {}

    def with_aliases(self, aliases: Mapping[str, str]) -> ConfigFields:
        return ConfigFields(self.path, self.values, aliases)

    @classmethod
    def read(cls, path: Path) -> ConfigFields:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{path} is not valid JSON ({error}).") from error
        if not isinstance(values, dict):
            raise ModelLoadError(f"{path} is not a JSON object.")
        return cls(path, values)

    def name_of(self, name: str) -> str:
        """The name under which the file has the field."""
        return name if name in self.values else self.aliases.get(name, name)

    def has(self, name: str) -> bool:
        return self.name_of(name) in self.values

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is; ``default`` where the field is absent."""
        return self.values.get(self.name_of(name), default)

    def wrong(self, name: str, expected: str) -> ModelLoadError:
        value = repr(self.get(name))
        if len(value) > _LONGEST_VALUE:
            value = f"{value[:_LONGEST_VALUE]}..."
        return ModelLoadError(f"{self.path}: {self.name_of(name)} must be {expected}, got {value}.")

    def integer(self, name: str, default: Any = REQUIRED) -> Any:
        """A positive integer; ``default`` where the field is absent or null."""
        value = self.get(name)
        if value is None:
            if default is REQUIRED:
                raise ModelLoadError(f"{self.path} has no {self.name_of(name)}.")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, "a positive integer")
        return value

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A finite positive number; ``default`` where the field is absent or null."""
        value = self.get(name)
        if value is None:
            if default is REQUIRED:
                raise ModelLoadError(f"{self.path} has no {self.name_of(name)}.")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def choice(self, name: str, default: str, supported: Mapping[str, Any]) -> Any:
        """What ``supported`` has under the field's value, a string."""
        value = self.get(name) or default
        if not isinstance(value, str) or value not in supported:
            raise ModelLoadError(
                f"{self.path}: {self.name_of(name)} {value!r} is not supported; supported are "
                f"{', '.join(supported)}."
            )
        return supported[value]

    def token_ids(self, name: str, default: int | None) -> tuple[int, ...]:
        """One id or a list of them; ``default`` where the field is absent (null means none)."""
        value = self.get(name, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            raise self.wrong(name, "a token id or a list of them")
        return tuple(item for item in ids if item >= 0)
