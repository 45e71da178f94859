"""Plain data that does not change: dictionaries that refuse to, and tuples in place of lists. No torch."""

from __future__ import annotations

from typing import Any, NoReturn


class Frozen(dict[str, Any]):
    """A dictionary as it was made. `dict(it)` and `it | other` are ones that can be changed.

    >>> Frozen(stage=3)["stage"] = 2
    Traceback (most recent call last):
    TypeError: a plan does not change; make another with zs.plan(), or pass options to zs.shard()
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a plan does not change; make another with zs.plan(), or pass options to zs.shard()")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


def frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return Frozen({name: frozen(item) for name, item in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def freeze(record: object, *names: str) -> None:
    """Fields of a frozen dataclass, in its `__post_init__`."""
    for name in names:
        object.__setattr__(record, name, frozen(getattr(record, name)))
