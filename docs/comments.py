"""For the API reference: the comment beside an attribute, or above it, is its text.

A method without text is left out: what it overrides is described where it is defined first. So is an attribute without
text, unless it is the field of a dataclass.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

import griffe

_BESIDE = re.compile(r"  # (?!noqa|type:)(.+?)(?:  # noqa.*)?$")
_ABOVE = re.compile(r" *# (?!---)(.+)$")


class Comments(griffe.Extension):
    """Gives attributes their comments as docstrings."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring is None and attr.lineno is not None and not isinstance(attr.filepath, list):
            lines = attr.lines_collection[attr.filepath]
            first, last = attr.lineno - 1, (attr.endlineno or attr.lineno) - 1
            found = _BESIDE.search(lines[first]) or _BESIDE.search(lines[last])
            above = [*takewhile(bool, map(_ABOVE.match, reversed(lines[:first])))]
            text = found[1] if found else " ".join(each[1] for each in reversed(above) if each)
            if text:
                attr.docstring = griffe.Docstring(text, parent=attr)

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        for name, member in [*cls.members.items()]:
            field = member.is_attribute and "dataclass" in cls.labels
            if not field and not member.has_docstring and not name.startswith("_"):
                cls.del_member(name)
