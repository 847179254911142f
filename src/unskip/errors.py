"""What unskip raises. Catch `UnskipError` for all of it; each message names the module path and the next step."""


class UnskipError(Exception):
    """Base of every error that unskip raises on purpose."""


class BadInput(UnskipError, ValueError):
    """An argument, a name or a number is wrong."""


class NoResidualError(UnskipError):
    """The model has no residual addition to work on."""


class ForwardError(UnskipError):
    """The model's forward failed on the example."""


class SourceError(UnskipError):
    """The source of a forward cannot be had, or does not match the code that runs."""


class RewireError(UnskipError):
    """An addition was found but cannot be rewired."""


class WrappedError(UnskipError):
    """The model is already compiled, hooked or wrapped; it has to be rewired first."""


class LoadError(UnskipError):
    """A saved folder is damaged, too new, or does not fit the model or its source."""


class InitError(UnskipError):
    """An initialisation does not fit the model, or its check failed."""


class MissingPackage(UnskipError, ImportError):
    """An optional package that is not installed."""


class TrainingError(UnskipError):
    """A run that cannot go on; its last checkpoint is whole."""


class UnskipWarning(UserWarning):
    """Something that works as asked but may not do what was meant."""
