"""Whether parsed JSON has the form that its reader takes for granted.

A form is a `Leaf`; a list with one form, for a list of such values; or a dict of forms by key, for
an object that may have other keys as well. A key that ends in "?" may be absent or null, and the
key "*" or "*?" stands for all keys.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

_LARGEST = 2**63 - 1  # more does not fit the integers of numpy; NaN and infinities fail as well


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A single value: what it should be, in words, and whether one is."""

    wanted: str
    fits: Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value <= _LARGEST


ANYTHING = Leaf("a value", lambda value: True)
TEXT = Leaf("a string", lambda value: isinstance(value, str))
COUNT = Leaf(
    "a whole number of at least 0", lambda value: type(value) is int and 0 <= value <= _LARGEST
)
ONE_OR_MORE = Leaf(
    "a whole number of at least 1", lambda value: type(value) is int and 1 <= value <= _LARGEST
)
AMOUNT = Leaf("a number of at least 0", lambda value: _number(value) and value >= 0)
POSITIVE = Leaf("a number above 0", lambda value: _number(value) and value > 0)
RATE = Leaf("a number of at least 1", lambda value: _number(value) and value >= 1)


def problem(value: Any, form: Any, place: str = "") -> str | None:
    """The first thing in `value` that is not of `form`, as "PLACE is VALUE, expected ..."."""
    found = f"{place or 'it'} is {value!r:.80}, expected"
    if isinstance(form, Leaf):
        return None if form.fits(value) else f"{found} {form.wanted}"
    parts = []
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{found} a list"
        parts = [(f"{place}[{i}]", each, form[0]) for i, each in enumerate(value)]
    else:
        if not isinstance(value, dict):
            return f"{found} an object"
        for every in form.keys() & {"*", "*?"}:
            form = {every.replace("*", key): form[every] for key in value}
        for key, inner in form.items():
            name = key.removesuffix("?")
            if key == name and name not in value:
                return f"{place}.{name} is absent".removeprefix(".")
            if key == name or value.get(name) is not None:
                parts.append((f"{place}.{name}".removeprefix("."), value[name], inner))
    found_wrong = (problem(each, inner, where) for where, each, inner in parts)
    return next((wrong for wrong in found_wrong if wrong is not None), None)
