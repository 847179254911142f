"""Shortcut rules, rewiring a model with them, and saving and loading it."""

from unskip.wiring._about import about
from unskip.wiring._builders import Builder
from unskip.wiring._effective_decay import BAND, band, effective_decay
from unskip.wiring._record import wiring_record
from unskip.wiring._restore import restore_wiring
from unskip.wiring._rewire import rewire, rewired
from unskip.wiring._rules import Anneal, Cut, Decay, Keep, Learn, Scale
from unskip.wiring._save import Mismatch, load, save, save_record
from unskip.wiring._select import Where, check_selector, picks
from unskip.wiring._shortcut import Shortcut, Weight, from_dict, parse, register
from unskip.wiring._wiring import Wiring, find_wiring

__all__ = [
    "BAND",
    "Anneal",
    "Builder",
    "Cut",
    "Decay",
    "Keep",
    "Learn",
    "Mismatch",
    "Scale",
    "Shortcut",
    "Weight",
    "Where",
    "Wiring",
    "about",
    "band",
    "check_selector",
    "effective_decay",
    "find_wiring",
    "from_dict",
    "load",
    "parse",
    "picks",
    "register",
    "restore_wiring",
    "rewire",
    "rewired",
    "save",
    "save_record",
    "wiring_record",
]
