"""Rules for the JSON texts of objects: declared properties in their order, then undeclared members.

The rules also bound the number of members, and write undeclared members that a condition requires. A grammar does not remember which
keys were written. Declared properties have a fixed order, so none occurs twice. Other keys may occur twice, and JSON readers keep the
last value. So a lower bound counts at most one undeclared member, and undeclared members that a condition requires come last.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from ...errors import GrammarError
from . import limits, strings
from .nodes import FALSE, TRUE, Node
from .notation import EMPTY, NOTHING, Expr, RuleReference, alt, rep, seq, text
from .objects import Objects, Property
from .strings import Strings
from .whitespace import Rules

_MOST_CONDITIONS = 4
_MEMBERS_PER_RULE = 16
_ONE_UNDECLARED = "Of the properties that minProperties needs, at most one is undeclared: undeclared keys may be equal."
_SHARED_CONDITIONS = (
    "If several conditions each ask for some property, either one undeclared property meets all of them, "
    "or each condition has keys of its own."
)


class ObjectWriter:
    """Writes the rules for one set of objects, `shape`; their names begin with `name`. Subclasses write members in other notations."""

    def __init__(self, rules: Rules, name: str, shape: Objects) -> None:
        self.rules, self.name, self.shape = rules, name, shape
        self.members = [prop for prop in shape.properties if prop.node != FALSE]
        self.undeclared = Strings(excluded=frozenset(shape.names)).simplified()
        open_to_all = not shape.exists and shape.rest == ((strings.ALL, TRUE),)
        self.rest = () if rules.closed and open_to_all and self.members else shape.rest
        self.comma: Expr = text(rules.whitespace.comma)
        self.low, self.high = shape.low, shape.high
        if self.high is not None and not self.rest and self.high >= len(self.members):
            self.high = None
        self.last = max(1, self.low) if self.high is None else max(1, self.high)
        self.done: set[str] = set()
        self.todo: list[tuple[str, Callable[[], Expr]]] = []
        if len(shape.exists) > _MOST_CONDITIONS:
            limits.exceeded(
                "conditions on some property", _MOST_CONDITIONS, "what must occur somewhere in an object", "not"
            )
        if self.last > 1 and sum(min(p, self.last) + 1 for p in range(len(self.members))) > limits.RULES:
            keyword = "minProperties" if self.high is None else "maxProperties"
            limits.exceeded(
                "RULES", limits.RULES, f"counting {len(self.members):,} properties to {self.last:,}", keyword
            )

    def write(self) -> Expr:
        whitespace = self.rules.whitespace
        empty = [text(rf"\{{{whitespace.empty}\}}")] if self.may_be_empty else []
        return alt(*empty, seq(text(rf"\{{{whitespace.opened}"), self.inside(), text(rf"{whitespace.closing}\}}")))

    @property
    def may_be_empty(self) -> bool:
        return self.low == 0 and not self.shape.exists and not any(prop.required for prop in self.members)

    def inside(self) -> Expr:
        """An expression for all members, of which there is at least one."""
        inside = self.declared(0, 0)
        while self.todo:  # iterative, because there may be thousands of properties
            rule, expression = self.todo.pop()
            self.rules.rule(rule, expression())
        return inside

    def declared(self, position: int, count: int) -> Expr:
        """The rest of the object, from the property at `position` on, after `count` members; `count` is at most ``self.last``."""
        if position == len(self.members):
            return self.undeclared_members(count, frozenset())
        if self.high is None and count == self.last:  # enough members: the count does not matter any more
            return self.named(f"p{position}", lambda: self.tail(position))
        return self.named(f"p{position}_{count}", lambda: self.choice(position, count))

    def tail(self, position: int) -> Expr:
        """The members from the property at `position` on, each after a comma. A rule has few members, then refers to a shared rule."""
        end = min(len(self.members), position + _MEMBERS_PER_RULE - position % _MEMBERS_PER_RULE)
        run = [self.optional(prop) for prop in self.members[position:end]]
        return seq(*run, self.declared(end, self.last))

    def optional(self, prop: Property) -> Expr:
        return rep(seq(self.comma, self.member(prop)), int(prop.required), 1)

    def choice(self, position: int, count: int) -> Expr:
        if self.last == 1 and self.high is None:  # count is 0: an alternative for each possible first member
            alternatives = []
            for index, prop in enumerate(self.members[position:], position):
                alternatives.append(seq(self.member(prop), self.declared(index + 1, 1)))
                if prop.required:
                    break
            else:
                alternatives.append(self.undeclared_members(0, frozenset()))
            first = next((i for i, prop in enumerate(self.members) if prop.required), None)
            if first is not None and first > 1:  # optional members in front of a required one
                before = [rep(seq(self.member(prop), self.comma), 0, 1) for prop in self.members[position:first]]
                return seq(*before, self.member(self.members[first]), self.declared(first + 1, 1))
            return alt(*alternatives)
        prop = self.members[position]
        alternatives = [] if prop.required else [self.declared(position + 1, count)]
        if self.high is None or count < self.high:
            comma = [self.comma] if count else []
            alternatives.append(seq(*comma, self.member(prop), self.declared(position + 1, min(count + 1, self.last))))
        return alt(*alternatives)

    def named(self, state: str, expression: Callable[[], Expr]) -> Expr:
        """A reference to the rule of `state`, which :meth:`inside` writes later by calling `expression`."""
        rule = f"{self.name}{state}"
        if rule not in self.done:
            self.done.add(rule)
            self.todo.append((rule, expression))
        return RuleReference(rule)

    def member(self, prop: Property) -> Expr:
        return seq(text(self.rules.key(prop.name) + self.rules.whitespace.colon), self.rules.place(prop.node))

    def undeclared_member(self, keys: Strings, value: Node) -> Expr:
        return seq(self.rules.string(keys, self.rules.whitespace.colon), self.rules.place(value))

    def undeclared_members(self, count: int, fulfilled: frozenset[int]) -> Expr:
        """The undeclared members after `count` members. fulfilled: indices of the entries of ``shape.exists`` that are met already."""
        shape = self.shape
        if self.low - count > 1:
            return self.several_undeclared()
        if shape.exists:
            return self.named(
                f"s{count}_{'_'.join(map(str, sorted(fulfilled)))}", lambda: self.members_fulfilling(count, fulfilled)
            )
        item = self.item(())
        needed = max(0, self.low - count)
        left = None if self.high is None else self.high - count
        if count:
            return rep(seq(self.comma, item), needed, left)
        # At least one member, because :meth:`write` adds the empty object.
        return seq(item, rep(seq(self.comma, item), max(0, needed - 1), None if left is None else left - 1))

    def several_undeclared(self) -> Expr:
        """Returns :data:`NOTHING` where ``minProperties`` needs several undeclared members, because their keys could be equal.

        Raises:
            GrammarError: the declared properties and one undeclared property are too few for ``minProperties``.
        """
        if self.item(()) != NOTHING:
            if len(self.members) + 1 < self.low:
                raise GrammarError(
                    f"minProperties {self.low} needs {self.low - 1} declared properties, since undeclared keys may repeat; "
                    "strict=False validates it afterwards",
                    "minProperties",
                )
            self.rules.warning(_ONE_UNDECLARED)
        return NOTHING

    def members_fulfilling(self, count: int, fulfilled: frozenset[int]) -> Expr:
        """Undeclared members: first some that meet no entry of ``shape.exists``, then some that each meet an entry not met before."""
        unfulfilled = [index for index in range(len(self.shape.exists)) if index not in fulfilled]
        comma = [self.comma] if count else []
        alternatives: list[Expr] = [EMPTY] if not unfulfilled and count >= max(1, self.low) else []
        repeated: Expr | None = None
        if len(self.shape.exists) > 1:
            self.rules.warning(_SHARED_CONDITIONS)
        for size in range(bool(fulfilled), len(unfulfilled) + 1) if self.high is None or count < self.high else ():
            for taken in combinations(unfulfilled, size):
                item = seq(*comma, self.item(taken, fulfilled))
                after = min(count + 1, self.last) if self.high is None else count + 1
                if not taken and after == count:
                    repeated = item
                else:
                    alternatives.append(seq(item, self.undeclared_members(after, fulfilled | set(taken))))
        return seq(rep(repeated, 0, None) if repeated is not None else EMPTY, alt(*alternatives))

    def item(self, taken: tuple[int, ...], fulfilled: frozenset[int] = frozenset()) -> Expr:
        """An undeclared member that meets the entries `taken` of ``shape.exists``, with a key that no entry in `fulfilled` allows."""
        nodes, alternatives = self.rules.normaliser.nodes, []
        for keys, node in self.rest:
            allowed_keys: Strings | None = (
                strings.intersection(keys, self.undeclared) if self.undeclared is not None else None
            )
            value: Node = node
            for index in taken:
                keys_of_condition, kind = self.shape.exists[index]
                allowed_keys = (
                    strings.intersection(allowed_keys, keys_of_condition) if allowed_keys is not None else None
                )
                value = nodes.intersection(value, kind)
            key_sets = [] if allowed_keys is None else [allowed_keys]
            for index in fulfilled:
                other_keys = strings.complement(self.shape.exists[index][0])
                key_sets = [
                    both
                    for keys_left in key_sets
                    for keys_apart in other_keys
                    if (both := strings.intersection(keys_left, keys_apart)) is not None
                ]
            alternatives += [self.undeclared_member(keys_left, value) for keys_left in key_sets]
        return alt(*alternatives)
