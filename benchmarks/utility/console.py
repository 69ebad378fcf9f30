"""A progress bar with an estimate of the time left; plain lines where the output is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

__all__ = ["Progress", "format_seconds"]


def format_seconds(seconds: float | None) -> str:
    """`75.0` as "1 min 15 s"; None as "unknown"."""
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class Progress:
    """Context manager; call it with (runs done, runs in all, estimated seconds left or None)."""

    def __init__(self, title: str, *, terminal: bool | None = None):
        self.title = title
        self._console = Console(file=sys.stderr)
        self._terminal = self._console.is_terminal if terminal is None else terminal
        self._began = time.monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        if self._terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("left: {task.fields[left]}"), console=self._console,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=None, left="unknown")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, left: float | None) -> None:
        text = format_seconds(0.0 if done == total else left)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, left=text)
        else:
            elapsed = format_seconds(time.monotonic() - self._began)
            print(f"{self.title}: {done}/{total} runs, {elapsed} so far, left: {text}", file=sys.stderr, flush=True)
