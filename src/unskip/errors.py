"""The exceptions of unskip. `UnskipError` is the base of all; messages name the module path and the next step."""


class UnskipError(Exception):
    """Base class of all errors that unskip raises."""


class BadInput(UnskipError, ValueError):
    """An argument, a name or a number is wrong."""


class NoResidualError(UnskipError):
    """The model has no residual addition."""


class ForwardError(UnskipError):
    """The model's forward failed on the example."""


class SourceError(UnskipError):
    """The source of a forward is not available, or does not match the running code."""


class RewireError(UnskipError):
    """An addition was found but cannot be rewired."""


class WrappedError(UnskipError):
    """The model is already compiled, hooked or wrapped; rewire it first."""


class LoadError(UnskipError):
    """A saved folder is damaged, too new, or does not fit the model or its source."""


class InitError(UnskipError):
    """An initialisation does not fit the model, or its check failed."""


class MissingPackage(UnskipError, ImportError):
    """An optional package is not installed."""


class TrainingError(UnskipError):
    """A run cannot continue; its last checkpoint is complete."""


class UnskipWarning(UserWarning):
    """Something works as requested but may not be what was intended."""
