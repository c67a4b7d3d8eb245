"""Every exception that this package raises by itself, and the run it carries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddplab.run import Run

__all__ = ["DdplabError", "LaunchError", "RankFailedError", "RankTimeoutError", "ShippingError"]


class DdplabError(Exception):
    """Base of what ddplab raises for things that happened.

    What a caller gave wrongly is a ``ValueError`` or a ``TypeError`` instead. A notebook shows the
    message alone: the lines of the launcher between the cell and the message tell a learner nothing.
    """

    report = ""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of the traceback."""
        return [f"{type(self).__name__}: {self}", *self.report.splitlines()]


class LaunchError(DdplabError):
    """The ranks could not be started or looked after; none is left."""


class ShippingError(DdplabError, TypeError):
    """Something that a rank would need cannot travel there; the message names it. Nothing was started."""


class RankFailedError(DdplabError):
    """At least one rank failed; ``run`` is the :class:`ddplab.Run` with all that the ranks told before.

    The message names the rank that failed first, the line and the reason. The traceback of that rank
    is a note of the exception: plain Python prints it, a notebook shows the few lines that matter.
    """

    def __init__(self, message: str, run: Run, report: str = "") -> None:
        super().__init__(message)
        self.run = run
        self.report = report
        if report:
            self.add_note(report)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.run, self.report)


class RankTimeoutError(RankFailedError, TimeoutError):
    """The ranks did not finish within ``timeout_s``; the message says where each of them was."""
