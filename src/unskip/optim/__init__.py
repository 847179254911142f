"""Optimizers that keep up without residuals: SOAP and Muon in batched form, parameter groups by role, schedules."""

from unskip.optim._soap import SOAP

__all__ = ["SOAP"]
