"""One save at a time per path, and nothing left behind: the hidden folder in which a checkpoint is made.

[Note: the holder] A save of ``ckpt/1000`` is made in the *holder* ``ckpt/.1000.saving/``: ``owner.json``,
locked (flock) by the process that saves, and a folder named by a random token, in which ranks write. The
commit is a rename of that folder to ``ckpt/1000``. So:

- a process that dies lets go of the lock, whatever killed it, and others see that at once; process ids would
  lie between containers that share a folder;
- a rank that outlives its job writes into a token that no longer exists, never into the next job's files;
- an existing checkpoint is swapped with the new one in one step (renameat2), or, where the file system
  cannot, moved into the holder as ``replaced`` first; a crash between the two moves is finished by `settle`.

Creating and settling holders happens under the *gate*, a brief flock on the parent folder itself, which needs
no lock file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.errors import CheckpointError

from . import disk
from .manifest import NAME, RANK_FILE
from .wording import os_error, some

OWNER = "owner.json"
REPLACED = "replaced"
HOLDER = re.compile(r"\.(.+)\.saving", re.DOTALL)
REMOVING = re.compile(r"\.(.+)\.removing-[0-9a-f]{16}", re.DOTALL)
# Seconds without a write after which a save by another host counts as dead: its lock may not be visible here.
STALE = 120.0
_GATE_WAIT = 10.0
# Seconds that forked children (data loader workers) of a dead process may go on holding its lock.
_ORPHANS = 6.0
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL)


@dataclass
class Claim:
    """The right to save to `target`, from `take` to `commit` and `release`."""

    target: Path
    token: str
    fd: int

    @property
    def holder(self) -> Path:
        return holder_of(self.target)

    @property
    def staging(self) -> Path:
        return self.holder / self.token

    def commit(self) -> None:
        """Make the staging folder the checkpoint at `target`, in one step. What was there goes with the
        holder."""
        check_target(self.target)
        try:
            disk.sync_folder(self.staging)
            if not os.path.lexists(self.target) or _is_empty(self.target):
                os.rename(self.staging, self.target)
            elif not disk.exchange(self.staging, self.target):
                os.rename(self.target, self.holder / REPLACED)
                os.rename(self.staging, self.target)
            disk.sync_folder(self.target.parent)
        except OSError as error:
            with suppress(OSError):
                self._put_back()
            raise os_error(error, f"moving the finished {self.staging} to", self.target) from error

    def _put_back(self) -> None:
        """What was there, where a replacement has stopped between its two moves."""
        if (self.holder / REPLACED).is_dir() and not os.path.lexists(self.target):
            os.rename(self.holder / REPLACED, self.target)

    def release(self) -> None:
        """Give the path up and remove the holder with all that is in it. Never raises: the save's own error
        matters more."""
        try:
            with gate(self.target.parent):
                mine = os.stat(self.holder / OWNER).st_ino == os.fstat(self.fd).st_ino
                if mine:
                    self._put_back()  # where it cannot be, the holder stays for `settle`
                gone = set_aside(self.holder) if mine else None
            if gone:
                shutil.rmtree(gone, ignore_errors=True)
        except (OSError, CheckpointError):
            pass  # the folder was removed under us; what remains of it is not ours
        finally:
            _unlock(self.fd)


def holder_of(target: Path) -> Path:
    return target.parent / f".{target.name}.saving"


def take(target: Path) -> Claim:
    """Claim `target`, or raise because a living process saves to it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        check_target(target)
        holder, token = holder_of(target), secrets.token_hex(8)
        with gate(target.parent) as held:
            gone = settle(target, held) if os.path.lexists(holder) else None
            fd = _found(holder, token)
        if gone:
            shutil.rmtree(gone, ignore_errors=True)
    except FileExistsError as error:
        raise CheckpointError(
            f"{target}: another process began to save to this path at the same moment."
        ) from error
    except OSError as error:
        raise os_error(error, "preparing to save to", target) from error
    return Claim(target, token, fd)


def check_target(target: Path) -> None:
    """Refuse to replace anything but a checkpoint: a folder with other things in it would lose them."""
    if not target.name or target.name.startswith("."):
        raise CheckpointError(f"{target} is not a name for a checkpoint: it is empty or hidden.")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(
            f"{target} is a file or a link; name a folder that does not exist, or a checkpoint to replace."
        )
    try:
        names = os.listdir(target)
    except FileNotFoundError:
        return
    except OSError as error:
        raise os_error(error, "reading", target) from error
    other = sorted(name for name in names if name != NAME and not RANK_FILE.fullmatch(name))
    if other:
        raise CheckpointError(
            f"{target} exists and holds {some(other)}, which are no checkpoint's files; saving there would "
            f"remove them. Save to a new folder, for example {target / '1'}."
        )


def settle(target: Path, held: bool) -> Path | None:
    """Deal with a holder found at `target`, under the gate: raise if its owner lives, else put it aside for
    removal.

    A replacement that stopped between its two moves is completed, or undone when the new checkpoint has no
    manifest.
    """
    holder = holder_of(target)
    fd = -1
    if (holder / OWNER).exists():
        fd = os.open(holder / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        owner = _owner(holder)
        if fd < 0 or "boot" not in owner:
            # Not signed yet: being born, if others can create while we look; else it died in between.
            living = not held and time.time() - _newest(holder) < STALE
        else:
            living = _alive(fd, owner, holder)
        if living:
            raise CheckpointError(
                f"process {owner.get('pid', '?')} on {owner.get('host', '?')} is saving to {target} now. "
                f"Two jobs must not save to one path; if that job is dead, remove {holder} and try again."
            )
        if not os.path.lexists(target) and (holder / REPLACED).is_dir():
            fresh = holder / str(owner.get("token", ""))
            good = fresh if (fresh / NAME).is_file() and fresh.parent == holder else holder / REPLACED
            os.rename(good, target)
            disk.sync_folder(target.parent)
        return set_aside(holder)
    finally:
        _unlock(fd)


def set_aside(folder: Path) -> Path:
    """Rename a folder so that nothing takes it for what it was; from then on removing it may take its time,
    or stop."""
    name = match.group(1) if (match := HOLDER.fullmatch(folder.name)) else folder.name
    aside = folder.parent / f".{name}.removing-{secrets.token_hex(8)}"
    os.rename(folder, aside)
    return aside


@contextmanager
def gate(folder: Path) -> Iterator[bool]:
    """Hold the folder's own lock for a moment; False where the file system has no locks on folders."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _lock(fd, _GATE_WAIT) == "held"
    finally:
        _unlock(fd)


def _lock(fd: int, patience: float) -> str:
    """``held``, ``busy`` (someone else holds it) or ``none`` (there are no locks here)."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return "held"
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return "none"
            if time.monotonic() >= deadline:
                return "busy"
        time.sleep(0.02)


def _unlock(fd: int) -> None:
    if fd >= 0:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may share it, so closing alone would not free it
        os.close(fd)


def _found(holder: Path, token: str) -> int:
    """Create a holder, or nothing when the disk has no room for it."""
    holder.mkdir()
    fd = -1
    try:
        fd = os.open(holder / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _sign(fd, token)
        (holder / token).mkdir()
    except OSError:
        _unlock(fd)
        shutil.rmtree(holder, ignore_errors=True)
        raise
    return fd


def _sign(fd: int, token: str) -> None:
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), "token": token}
    _lock(fd, 0)
    os.write(fd, json.dumps(owner).encode())


def _owner(holder: Path) -> dict[str, Any]:
    try:
        with open(holder / OWNER, "rb") as file:
            owner = json.loads(file.read(4096))
        return owner if isinstance(owner, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _alive(fd: int, owner: dict[str, Any], holder: Path) -> bool:
    """Whether the owner of a locked file lives. On return of False this process holds the lock, where locks
    exist."""
    local = owner.get("boot") == _boot()
    pid = owner.get("pid")
    dead = local and isinstance(pid, int) and 0 < pid < 1 << 31 and not os.path.exists(f"/proc/{pid}")
    state = _lock(fd, _ORPHANS if dead else 0)
    if state == "busy":
        return True
    if state == "held" and (local or owner.get("host") == socket.gethostname()):
        return False
    return not dead and time.time() - _newest(holder) < STALE


def _newest(folder: Path) -> float:
    """When anything in a holder was last written: its heartbeat, since ranks write all the time."""
    times = [folder.stat().st_mtime]
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                times.append(os.lstat(os.path.join(root, name)).st_mtime)
            except OSError:
                continue
    return max(times)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _is_empty(folder: Path) -> bool:
    return not os.listdir(folder)
