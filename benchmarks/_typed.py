"""Finds measured numbers in the prose of README and docs that are not checked against a record.

A measured number is a decimal, or an integer with %, points or times. Tables, checked sentences and numbers that are
not results (code, links, settings, versions, numbers from papers) are excluded. Counts are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Words before a setting; several settings may follow: "weight decay 0.1 to 0.3".
_WORDS = (
    "alpha_min|weight decay|decay|decayed|product|guidance|temperature|momentum|mask|EMA|AdamW|self_attention|"
    "qk_identity|mlp_bias|bias|threshold|cosine|contrast|crops|T|cifar|digits|sqrt|rate|lr|width of 384|from 1|"
    "accepts at|elsewhere at|level at|domain from|closer than|noise;|last step|colour,|roundings|in float16,|"
    "ImageNet's values|the size of ImageNet|Python|CPython|torch|pytorch_optimizer|capability|Apache|"
    "never over|in a row or column or|thinned to"
)
_AFTER = r"(?::| =| of| to| above| between| \|)?[ (-]*"
_NOT_MEASURED = (
    r"\]\([^)]*\)|`[^`]*`|https?://\S+|\d{4}\.\d{5}",  # links, code, papers
    rf"\b(?:{_WORDS}){_AFTER}\d[\d.e-]*(?:(?:,| to| and| or|, \w+) \d[\d.e-]*)*",
    r"[^.|]*\b(?:[Tt]he paper|[Pp]aper's|published)\b(?:[^.|]|\.(?=\d))*[.|]",  # a sentence about numbers from a paper
    r"\b[1-9.]+e-\d+",  # learning rates and tolerances
    r"(?:[^.]|\.(?=\d))*no record (?:was )?kept",
)
_NUMBER = re.compile(
    r"(?<![\w.])\d+\.\d+(?![\w.]*\d)"
    r"|(?<![\w.,^])\d[\d,]*(?: ?%(?! interval| confidence| Wilson| error bars)| points\b"
    r"| times (?:as (?:fast|many)|faster|slower))"
)


def typed(text: str, checked: Iterable[str]) -> list[str]:
    """Each unchecked number of a page, with the surrounding text."""
    text = re.sub(r"<!-- table.*?<!-- end -->|```.*?```|<[a-z/][^>]*>", "", text, flags=re.DOTALL)
    text = " ".join(re.sub(r"^ {4}.*\n", "", text, flags=re.MULTILINE).split())  # without indented code
    parts = [at.span() for part in checked for at in re.finditer(re.escape(part), text)]
    parts += [at.span() for pattern in _NOT_MEASURED for at in re.finditer(pattern, text)]
    return [
        text[max(0, found.start() - 50) : found.end() + 25]
        for found in _NUMBER.finditer(text)
        if not any(start <= found.start() < end for start, end in parts)
    ]
