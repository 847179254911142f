"""Optimizers: batched SOAP and Muon, parameter groups by role, schedules."""

from unskip.optim import schedules
from unskip.optim._build import build, group_of, own_group, register
from unskip.optim._groups import Assigned, Decays, Groups, groups
from unskip.optim._muon import Muon
from unskip.optim._precision import matmul_precision
from unskip.optim._soap import SOAP

__all__ = [
    "SOAP",
    "Assigned",
    "Decays",
    "Groups",
    "Muon",
    "build",
    "group_of",
    "groups",
    "matmul_precision",
    "own_group",
    "register",
    "schedules",
]
