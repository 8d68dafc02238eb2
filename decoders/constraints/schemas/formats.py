"""The known formats of strings as patterns; unknown formats restrict nothing.

A pattern allows what its standard allows, with these exceptions:

- date: not the year 0000; time: no leap seconds, at most nine digits of a second, no small t and z; date-time: all of these
- email: no quoted local parts, no addresses in brackets
- hostname: at most 3 labels; but up to 7 labels of at most 35 characters, 11 of at most 18 (the first may be longer), and 42 of at
  most 5

Values in the schema itself (``enum``, ``const``) are allowed as they are.
"""

from __future__ import annotations

from functools import lru_cache

from ..patterns import ecma
from ..patterns.tree import Pattern

# The year 0 is left out: the standard allows it, but the date types of programming languages do not.
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_YEAR_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_YEAR_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"


def _label(most: int) -> str:
    return f"[A-Za-z0-9](?:[A-Za-z0-9\\-]{{0,{most - 2}}}[A-Za-z0-9])?"


def _labels(first: int, other: int) -> str:
    """A pattern for names: a label of up to `first` characters, then labels of up to `other`, as many as fit into 253 characters."""
    return rf"{_label(first)}(?:\.{_label(other)}){{0,{(_LONGEST_NAME - first) // (other + 1)}}}"


_LONGEST_NAME = 253
# A name has at most 253 characters, a label at most 63; an automaton that counts both exactly would be too large.
_HOSTNAME = "|".join(_labels(*sizes) for sizes in ((63, 63), (63, 18), (35, 35), (5, 5)))
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]+"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
# Eight groups; the last two groups may be an IPv4 address; :: stands for one or more groups.
_IPV6 = "|".join((
    f"(?:{_H16}:){{7}}{_H16}", f"(?:{_H16}:){{1,7}}:", f"::(?:(?:{_H16}:){{0,6}}{_H16})?",
    *(f"(?:{_H16}:){{{n}}}(?::{_H16}){{1,{7 - n}}}" for n in range(1, 7)),
    f"(?:(?:{_H16}:){{6}}|::(?:{_H16}:){{0,5}}|"
    + "|".join(f"(?:{_H16}:){{{n}}}(?::{_H16}){{0,{5 - n}}}:" for n in range(1, 6)) + f"){_IPV4}",
))  # fmt: skip
_UNRESERVED = r"[A-Za-z0-9\-._~!$&'()*+,;=]"
_ESCAPED = "%[0-9A-Fa-f]{2}"
_REGISTERED = f"(?:{_UNRESERVED}|{_ESCAPED})*"
_IN_USER, _IN_SEGMENT, _IN_PATH, _IN_QUERY = (
    f"(?:{_UNRESERVED[:-1]}{more}]|{_ESCAPED})" for more in (":", ":@", ":@/", ":@/?")
)
_HOST = rf"(?:\[(?:{_IPV6}|v[0-9A-Fa-f]+\.(?:{_UNRESERVED[:-1]}:])+)\]|{_REGISTERED})"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+\-.]*:(?://(?:{_IN_USER}*@)?{_HOST}(?::[0-9]*)?(?:/{_IN_PATH}*)?"
    rf"|/(?:{_IN_SEGMENT}{_IN_PATH}*)?|(?:{_IN_SEGMENT}{_IN_PATH}*)?)(?:\?{_IN_QUERY}*)?(?:#{_IN_QUERY}*)?"
)
_DURATION_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_label(63)}(?:\.{_label(63)})*",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "json-pointer": r"(?:/(?:[^/~]|~[01])*)*",
}


@lru_cache
def tree(name: str) -> Pattern:
    """A regular tree for the strings of a known format."""
    return ecma.strings(f"^(?:{FORMATS[name]})$")[0][0]
