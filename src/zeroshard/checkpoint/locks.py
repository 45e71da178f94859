"""Locks that keep two saves, and two runs, from writing into one folder.

One save at a time per path, and nothing left behind: the hidden folder in which a checkpoint is made.

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

One run at a time saves into a folder: its claim, which lives as long as the process that made it.

[Note: living and dead] The claim on ``ckpt`` is the file ``ckpt/.zeroshard-run``, which says whose it is.
Its process holds a lock on it (flock) and touches it every few seconds. So, of one that another process
finds:

- where the lock is held, its process lives;
- where the lock is free and the process was one of this machine, it has died (killed, or the machine was
  started anew), and its claim is taken over;
- where the process was one of another machine, whose locks may not show here, the last touch decides: it is
  waited for until it is touched again, and its process lives, or until `STALE`, and it has died. Times are
  those of the file system, never of two hosts' clocks.

A process that was stopped for longer than that finds its claim taken at its next save, which is refused.
Loading needs no claim. Several runs of one process share theirs, and so do processes of one job.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.checkpoint import durable_files
from zeroshard.errors import CheckpointError

from .manifest import NAME, RANK_FILE
from .untrusted import os_error, quoted, some

OWNER = "owner.json"
REPLACED = "replaced"
HOLDER = re.compile(r"\.(.+)\.saving", re.DOTALL)
REMOVING = re.compile(r"\.(.+)\.removing-[0-9a-f]{16}", re.DOTALL)
# Seconds without a write after which a save by another host counts as dead: its lock may not be visible here.
STALE = 120.0
_GATE_WAIT = 10.0
_LONGEST = 4096  # bytes that say whose a file is
# Seconds that forked children (data loader workers) of a dead process may go on holding its lock.
ORPHANS = 6.0
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL)


@dataclass(frozen=True)
class LockKind:
    """What is made in a folder: the names of its files, and how messages call it."""

    name: str
    files: re.Pattern[str]


CHECKPOINT = LockKind("a checkpoint", re.compile(f"{re.escape(NAME)}|{RANK_FILE.pattern}", RANK_FILE.flags))


@dataclass
class SaveLock:
    """The right to save to `target`, from `take` to `commit` and `release`."""

    target: Path
    holder: Path
    staging: Path  # named by the token
    fd: int
    kind: LockKind
    overwrite: bool

    def commit(self) -> None:
        """Make the staging folder the checkpoint at `target`, in one step. What was there goes with the
        holder."""
        check_target(self.target, self.kind, self.overwrite)
        try:
            durable_files.sync_folder(self.staging)
            if not self.overwrite or not os.path.lexists(self.target) or _is_empty(self.target):
                os.rename(self.staging, self.target)  # fails where another process has filled it by now
            elif not durable_files.exchange(self.staging, self.target):
                os.rename(self.target, self.holder / REPLACED)
                os.rename(self.staging, self.target)
            durable_files.sync_folder(self.target.parent)
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
            unlock(self.fd)


def holder_of(target: Path) -> Path:
    return target.parent / f".{target.name}.saving"


def take(target: Path, kind: LockKind = CHECKPOINT, overwrite: bool = True) -> SaveLock:
    """Claim `target`, or raise because a living process saves to it, or because it exists and is not to be
    overwritten."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        check_target(target, kind, overwrite)
        holder = holder_of(target)
        staging = holder / secrets.token_hex(8)
        with gate(target.parent) as held:
            gone = settle(target, held) if os.path.lexists(holder) else None
            holder.mkdir()
            fd = -1
            try:
                fd = os.open(holder / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                lock(fd, 0)
                _sign(fd, {"token": staging.name})
                staging.mkdir()
            except OSError:  # all of it, or nothing when the disk has no room for it
                unlock(fd)
                shutil.rmtree(holder, ignore_errors=True)
                raise
        if gone:
            shutil.rmtree(gone, ignore_errors=True)
    except FileExistsError as error:
        raise CheckpointError(
            f"{target}: another process began to save to this path at the same moment."
        ) from error
    except OSError as error:
        raise os_error(error, "preparing to save to", target) from error
    return SaveLock(target, holder, staging, fd, kind, overwrite)


def check_target(target: Path, kind: LockKind = CHECKPOINT, overwrite: bool = True) -> None:
    """Refuse to replace anything that is not of this kind, since a folder with other things in it would lose
    them; and anything at all that is not to be overwritten."""
    if not target.name or target.name.startswith("."):
        raise CheckpointError(f"{target} is not a name for {kind.name}: it is empty or hidden.")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(
            f"{target} is a file or a link; name a folder that does not exist, or {kind.name} to replace."
        )
    try:
        names = os.listdir(target)
    except FileNotFoundError:
        return
    except OSError as error:
        raise os_error(error, "reading", target) from error
    other = sorted(name for name in names if not kind.files.fullmatch(name))
    if other:
        raise CheckpointError(
            f"{target} exists and holds {some(other)}, which {kind.name} does not consist of; saving there "
            f"would remove them. Save to a new folder, for example {target / '1'}."
        )
    if names and not overwrite:
        raise CheckpointError(
            f"{target} exists and is {kind.name}, which stays as it is. Name a folder that does not exist, "
            "or pass overwrite=True (on the command line --overwrite) to replace it by the new one."
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
        owner = _owner_in(holder / OWNER)
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
            durable_files.sync_folder(target.parent)
        return set_aside(holder)
    finally:
        unlock(fd)


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
        yield lock(fd, _GATE_WAIT) == "held"
    finally:
        unlock(fd)


def lock(fd: int, patience: float) -> str:
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


def unlock(fd: int) -> None:
    if fd >= 0:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may share it, so closing alone would not free it
        os.close(fd)


def _sign(fd: int, more: dict[str, Any]) -> None:
    """Say in a locked file whose it is."""
    whose = {"pid": os.getpid(), "host": socket.gethostname(), "boot": boot_id()}
    os.ftruncate(fd, 0)
    os.write(fd, json.dumps(whose | more).encode())


def _owner_in(path: Path) -> dict[str, Any]:
    """Whose a file says that it is; nothing where it cannot be read."""
    try:
        with open(path, "rb") as file:
            owner = json.loads(file.read(_LONGEST))
        return owner if isinstance(owner, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _alive(fd: int, owner: dict[str, Any], holder: Path) -> bool:
    """Whether the owner of a locked file lives. On return of False this process holds the lock, where locks
    exist."""
    local = owner.get("boot") == boot_id()
    pid = owner.get("pid")
    dead = local and isinstance(pid, int) and 0 < pid < 1 << 31 and not os.path.exists(f"/proc/{pid}")
    state = lock(fd, ORPHANS if dead else 0)
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


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _is_empty(folder: Path) -> bool:
    return not os.listdir(folder)


FILE = ".zeroshard-run"
BEAT = 10.0  # seconds from one touch of a claim to the next
RECENT = 4  # folders that a run keeps as its own
FOLDER_STALE = 120.0  # seconds without one after which the process of another machine counts as dead

log = logging.getLogger("zeroshard")


class FolderLockedError(CheckpointError):
    """A folder belongs to another run, which lives."""


@dataclass
class FolderLock:
    """The claim of this process on a folder; `fd` is -1 where another process of this job has it."""

    folder: Path
    token: str
    fd: int
    holders: set[int] = field(default_factory=set)  # ids of the `RunFolders` that want it

    @property
    def stands(self) -> bool:
        """Whether the file is still this one; somebody may have removed it, or taken it over."""
        return _owner_in(self.folder / FILE).get("token") == self.token

    def beat(self) -> None:
        if self.fd >= 0:
            with suppress(OSError):
                os.utime(self.fd)

    def give_up(self) -> None:
        """Remove the file, if it is still this one. Never raises."""
        if self.fd < 0:
            return
        with suppress(OSError), gate(self.folder):
            if self.stands:
                (self.folder / FILE).unlink()
        unlock(self.fd)
        self.fd = -1


class RunFolders:
    """The folders into which one run saves. The address at which the processes of its job have met is the
    same for all of them, and the rank another for each; no address where the process is a job of its own."""

    def __init__(self, address: str = "", port: int = 0, rank: int = 0) -> None:
        here = address.startswith("127.") or address in ("localhost", "::1")
        self._job = f"{address}:{port} {boot_id() if here else ''}" if address else None
        self._rank = rank

    def hold(self, folder: Path) -> None:
        """Claim a folder, or see that its claim still stands. Raises `FolderLockedError` where another run
        lives there. Of more folders than `RECENT` those that it saved into last stay its own: front ends
        have one for each checkpoint, and each costs a file descriptor."""
        folder = Path(os.path.realpath(folder))
        with _taking:
            known = _held_locks.get(folder)
            if known is None or not known.stands:
                try:
                    found = _take(folder, {"job": self._job, "rank": self._rank})
                except OSError as error:
                    raise os_error(error, "claiming", folder) from error
                with _mutex:
                    if known is not None:
                        found.holders.update(known.holders)
                        unlock(known.fd)
                    _held_locks[folder] = known = found
            known.holders.add(id(self))
            with _mutex:
                _held_locks[folder] = _held_locks.pop(folder)  # the latest comes last
                self._give_up([f for f, held in _held_locks.items() if id(self) in held.holders][:-RECENT])
                if not _beats or not _beats[0].is_alive():  # a thread touches what is claimed
                    _beats[:] = [threading.Thread(target=_beat, name="claim", daemon=True)]
                    _beats[0].start()

    def release(self) -> None:
        """Give up what no other run of this process saves into."""
        with _taking, _mutex:
            self._give_up(list(_held_locks))

    def _give_up(self, folders: list[Path]) -> None:
        for folder in folders:
            held = _held_locks[folder]
            held.holders.discard(id(self))
            if not held.holders:
                del _held_locks[folder]
                held.give_up()


def goes_on(folder: str | os.PathLike[str]) -> None:
    """This process goes on from the checkpoints in `folder`, so they are its own from now on."""
    _own.add(Path(os.path.realpath(folder)))


def has_saved(checkpoint: Path) -> None:
    """This process has saved a checkpoint, which is its own."""
    _own.add(_real(checkpoint))


def is_own(checkpoint: Path) -> bool:
    """Whether this process may replace or remove a checkpoint unasked."""
    return not _own.isdisjoint((_real(checkpoint), _real(checkpoint).parent))


def _real(checkpoint: Path) -> Path:
    return Path(os.path.realpath(checkpoint.parent)) / checkpoint.name


_own: set[Path] = set()  # checkpoints, and folders of them
_held_locks: dict[Path, FolderLock] = {}
_taking = threading.Lock()  # held while a claim is made, which may take minutes
_mutex = threading.Lock()  # held while claims, and their files, are used or closed
_beats: list[threading.Thread] = []


def _beat() -> None:
    while True:
        time.sleep(BEAT)
        with _mutex:
            if not _held_locks:
                _beats.clear()
                return
            for held in _held_locks.values():
                held.beat()


def _give_up_all() -> None:
    with _mutex:
        for held in _held_locks.values():
            held.give_up()
        _held_locks.clear()


def _forget_in_child() -> None:
    """A forked child (a worker of a data loader) is not the run, and must not keep its locks."""
    global _mutex, _taking
    _mutex, _taking = threading.Lock(), threading.Lock()
    for held in _held_locks.values():
        if held.fd >= 0:
            os.close(held.fd)
    _held_locks.clear()
    _beats.clear()


atexit.register(_give_up_all)
os.register_at_fork(after_in_child=_forget_in_child)


# ---------------------------------------------------------------------- taking


@dataclass(frozen=True)
class _OtherLock:
    """A claim of which nobody can tell here whether its process lives: when it was touched, and how long ago
    that is."""

    owner: dict[str, Any]
    touched: float
    age: float


def _take(folder: Path, job: dict[str, Any]) -> FolderLock:
    """Claim it, if need be after waiting for a sign of life of a process elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: _OtherLock | None = None
    while True:
        with gate(folder):
            found = _try(folder, job)
        if isinstance(found, FolderLock):
            if seen is not None:
                log.warning(
                    "%s was claimed by a run that has died (%s); going on.", folder, _whose(seen.owner)
                )
            return found
        if seen is not None and found.touched != seen.touched:
            raise _living(folder, found.owner)
        if seen is None:
            log.warning(
                "%s is claimed by %s. Waiting %.0f s at most for a sign that it lives.",
                folder,
                _whose(found.owner),
                FOLDER_STALE - found.age,
            )
        seen = found
        time.sleep(min(1.0, BEAT / 4))


def _try(folder: Path, job: dict[str, Any]) -> FolderLock | _OtherLock:
    path = folder / FILE
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o666)
    keep = False
    try:
        owner, state = _owner_in(path), lock(fd, 0)
        if state == "busy" and not _orphaned(fd, owner):
            if _same_job(owner, job):
                return FolderLock(folder, str(owner["token"]), -1)
            raise _living(folder, _owner_in(path) or owner)
        if owner and not _dead(owner, state):
            touched = os.fstat(fd).st_mtime
            if (age := _now(folder) - touched) < FOLDER_STALE:
                return _OtherLock(owner, touched, age)
        token = secrets.token_hex(8)
        _sign(fd, {"machine": _machine(), **job, "since": time.time(), "token": token})
        keep = True
        return FolderLock(folder, token, fd)
    finally:
        if not keep:
            unlock(fd)


def _orphaned(fd: int, owner: dict[str, Any]) -> bool:
    """Whether a lock that is held was that of a process that has died; what it forked may have it for a
    moment longer."""
    pid = owner.get("pid")
    gone = isinstance(pid, int) and 0 < pid < 1 << 31 and not os.path.exists(f"/proc/{pid}")
    return owner.get("boot") == boot_id() and gone and lock(fd, ORPHANS) == "held"


def _dead(owner: dict[str, Any], state: str) -> bool:
    """Of a claim whose lock is free, or in a file system without locks."""
    here = owner.get("boot") == boot_id()
    if state == "held":
        return here or (bool(owner.get("machine")) and owner.get("machine") == _machine())
    pid = owner.get("pid")
    return here and isinstance(pid, int) and 0 < pid < 1 << 31 and not os.path.exists(f"/proc/{pid}")


def _same_job(owner: dict[str, Any], job: dict[str, Any]) -> bool:
    return bool(job["job"]) and owner.get("job") == job["job"] and owner.get("rank") != job["rank"]


def _now(folder: Path) -> float:
    """The time by the clock that the file system's times are of."""
    probe = folder / f"{FILE}.{secrets.token_hex(8)}"
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        with suppress(OSError):
            probe.unlink()


def _machine() -> str:
    """What stays the same when a machine is started anew."""
    try:
        name = Path("/etc/machine-id").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
    return f"{socket.gethostname()} {name}" if name else ""


def _living(folder: Path, owner: dict[str, Any]) -> FolderLockedError:
    return FolderLockedError(
        f"{folder} belongs to another run, which is alive: {_whose(owner)}. Two runs in one folder would mix "
        "their checkpoints, and go on from each other's. End that run, or save and resume in another folder. "
        f"Loading needs no claim: run.load(zs.latest({str(folder)!r})). If that process is no run any more, "
        f"remove {folder / FILE}."
    )


def _whose(owner: dict[str, Any]) -> str:
    since = owner.get("since")
    try:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(since or 0)))
    except (ValueError, TypeError, OverflowError, OSError):
        when = "an unknown time"
    return f"process {owner.get('pid', '?')} on {quoted(str(owner.get('host', '?')))}, since {when}"
