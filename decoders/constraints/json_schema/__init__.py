"""JSON Schema: from a schema to the language of the texts that are valid under it."""

from .spec import JsonSchema

__all__ = ["JsonSchema"]
