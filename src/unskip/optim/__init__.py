"""Optimizers that keep up without residuals: SOAP and Muon in batched form, parameter groups by role, schedules."""

from unskip.optim import schedules
from unskip.optim._build import build, without_betas
from unskip.optim._groups import Assigned, Groups, groups
from unskip.optim._muon import Muon
from unskip.optim._precision import products
from unskip.optim._soap import SOAP

__all__ = ["SOAP", "Assigned", "Groups", "Muon", "build", "groups", "products", "schedules", "without_betas"]
