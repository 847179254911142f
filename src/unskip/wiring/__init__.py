"""Turn the knob: the rules for shortcut weights, and rewiring, which puts them into a model."""

from unskip.wiring._rewire import rewire, rewired
from unskip.wiring._save import load, save
from unskip.wiring._wiring import Wiring
from unskip.wiring.shortcuts import Anneal, Cut, Decay, Keep, Learn, Scale, Shortcut

__all__ = [
    "Anneal",
    "Cut",
    "Decay",
    "Keep",
    "Learn",
    "Scale",
    "Shortcut",
    "Wiring",
    "load",
    "rewire",
    "rewired",
    "save",
]
