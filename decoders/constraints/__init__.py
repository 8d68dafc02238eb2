"""Grammar-constrained decoding: token masks keep a text within a formal language. Other packages import only the names listed here.

``base`` defines the interface of a grammar backend.
"""

from ..common import library
from .auto import Auto
from .base import Backend, CompiledGrammar, Language, Matcher, Tables, Tabulated, mask_words, pack, unpack
from .call_formats import FORMATS, Call, CallFormat, ParsedAnswer
from .calls import Called, CallSpec
from .coerce import TYPES, as_spec, as_specs, full_name, spec_of_file, spec_of_library, type_names, unknown_grammar
from .compiling import Compilation, compiled
from .constructors import choice, grammar, json_schema, regex
from .function_calls import FunctionCalls
from .llguidance import LLGuidance
from .llguidance.source import refuse_invalid
from .lookups import LazyMasks, TokenTable
from .schemas.keywords import MISSPELT
from .specs import JsonSchema, Lark, Regex, Spec
from .table import Table, TableGrammar
from .tags import After, Calls, Tagged, TaggedGrammar, Thinking, ThinkingMarkers, after, tagged
from .vocabulary import Policy, Vocabulary

#: The built-in backends, in the order in which listings show them.
BUILT_IN: tuple[type[Backend], ...] = (Auto, Table, LLGuidance)

__all__ = [
    "BUILT_IN", "FORMATS", "After", "Auto", "Backend", "Call", "CallFormat", "CallSpec", "Called", "Calls", "Compilation",
    "CompiledGrammar", "FunctionCalls", "JsonSchema", "LLGuidance", "Language", "Lark", "LazyMasks", "MISSPELT", "Matcher",
    "Policy", "Regex", "Spec", "TYPES", "Table", "TableGrammar", "Tables", "Tabulated", "Tagged", "TaggedGrammar", "Thinking",
    "ThinkingMarkers", "TokenTable", "Vocabulary", "ParsedAnswer", "after", "as_spec", "as_specs", "choice", "compiled", "full_name",
    "grammar", "json_schema", "library", "mask_words", "pack", "refuse_invalid", "regex", "spec_of_file", "spec_of_library",
    "tagged", "type_names", "unknown_grammar", "unpack",
]  # fmt: skip
