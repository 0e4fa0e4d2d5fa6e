"""Every error this package raises on purpose: each message says what, where and what to do."""

from __future__ import annotations


class WorkbenchError(Exception):
    """Base class of all errors raised on purpose by this package."""


class InvalidInputError(WorkbenchError, ValueError):
    """An argument is wrong; raised before any work starts, nothing was changed."""


class UnsupportedModelError(WorkbenchError, NotImplementedError):
    """The model family, or one of its configuration fields, is not handled."""


class StaleStateError(WorkbenchError, RuntimeError):
    """A resident state was captured under another weight version than the policy has now."""


class NonDeterministicError(WorkbenchError, RuntimeError):
    """A recomputed pass selected other keys or experts than the pass it repeats, so its gradient would be wrong."""


class NonFiniteError(WorkbenchError, ArithmeticError):
    """NaN or infinity in model output or gradient; the message names stage, member and layer."""


class RanksDisagreeError(WorkbenchError, RuntimeError):
    """Ranks brought different arguments, called different collectives, or hold different replicas."""


class RankFailedError(WorkbenchError, RuntimeError):
    """A rank of a launched run failed, died or stalled; the message names the rank and the stage."""


def first_line(error: BaseException) -> str:
    """What an error says in one line; its name if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
