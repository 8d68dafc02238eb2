"""Which keywords a draft has. One of another draft is an unknown name there: it says nothing."""

from __future__ import annotations

#: The year of the draft that brought a keyword, where that is not the first one.
_SINCE = {
    "const": 2017, "contains": 2017, "propertyNames": 2017, "if": 2018, "then": 2018, "else": 2018, "minContains": 2019,
    "maxContains": 2019, "dependentRequired": 2019, "dependentSchemas": 2019, "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019, "$recursiveRef": 2019, "prefixItems": 2020, "$dynamicRef": 2020,
}  # fmt: skip
#: The last year in which a keyword says something. Lists under ``items``, and so ``additionalItems``, are read in all drafts.
_UNTIL = {"dependencies": 2018, "$recursiveRef": 2019}


def known(keyword: str, year: int) -> bool:
    """Whether the draft of `year` has `keyword`; true for names that no draft has."""
    return _SINCE.get(keyword, 0) <= year <= _UNTIL.get(keyword, year)
