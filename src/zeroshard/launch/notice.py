"""SIGTERM as news: a scheduler that wants the machine back sends it, and some seconds later SIGKILL."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Notice:
    """One per process, like the signal. It only takes note, so that it can arrive at any moment of a step."""

    _listening = False
    _given = False

    @classmethod
    def given(cls) -> bool:
        """Whether SIGTERM has come since the first call, which is when listening begins.

        Python lets only the main thread listen; in others (ranks as threads) the answer is that thread's.
        """
        if not cls._listening and threading.current_thread() is threading.main_thread():
            cls._listen()
        return cls._given

    @classmethod
    def _listen(cls) -> None:
        before = signal.getsignal(signal.SIGTERM)

        def note(number: int, frame: FrameType | None) -> None:
            cls._given = True
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, note)
        cls._listening = True
