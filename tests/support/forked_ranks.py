"""Ranks that are forks of a process that has collected the tests: what these import is there already.

Libraries such as transformers, Lightning and Keras take three seconds to import, in each rank of each file.
Ranks of other tests are forks of a process that has imported torch and ZeroShard alone, as a user's are.
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
from multiprocessing import connection, forkserver, resource_tracker
from unittest.mock import patch

from zeroshard.testing import Ranks

# Python 3.14 has its servers ask for a key first.
POSSIBLE = "authkey_r" not in inspect.signature(forkserver.main).parameters


class Server(forkserver.ForkServer):
    """As multiprocessing's own, but a fork of this process and not a new one."""

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()

    def start(self) -> None:
        """Before any test has run, and while no thread but this one does."""
        with socket.socket(socket.AF_UNIX) as listener:
            self._forkserver_address = connection.arbitrary_address("AF_UNIX")
            listener.bind(self._forkserver_address)
            listener.listen()
            alive, self._forkserver_alive_fd = os.pipe()
            self._forkserver_pid = os.fork()
            if self._forkserver_pid == 0:
                self._serve(listener.detach(), alive)
        os.close(alive)

    def _serve(self, listener: int, alive: int) -> None:
        try:
            os.close(self._forkserver_alive_fd)  # whose end tells that the tests have
            # Those of pytest belong to the process that collects what is written.
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
            forkserver.main(listener, alive, [])
        finally:
            os._exit(0)


SERVER = Server()


class ForkedRanks(Ranks):
    """Ranks of `SERVER`, where it was started."""

    def _start(self) -> None:
        if SERVER._forkserver_address is None:
            super()._start()
            return
        with patch.object(forkserver, "connect_to_new_process", SERVER.connect_to_new_process):
            super()._start()
