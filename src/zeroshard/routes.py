"""Which codec each parameter gets: the `compress=` and `gather=` options of `shard`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from .codec import Codec, Compression, Delta, LowRank, Rows
from .errors import OptionError
from .policy import Adaptive, EveryStep, Local, Sync, choices_of, delays

#: Patterns of parameter names and the codec of each, None: as they are. The first that matches counts.
Routes = tuple[tuple[str, Compression | None], ...]


def routes_of(value: Any, what: str = "compress") -> Routes:
    """`compress=` or `gather=` as pairs: a codec for all parameters, or a mapping from name patterns to
    codecs.

    >>> from zeroshard.codec import Int8
    >>> routes_of({"*norm*": None, "*": Int8()})
    (('*norm*', None), ('*', Int8(block=256, residual='float32', feedback=False, stochastic=False)))
    """
    if value is None:
        return ()
    if isinstance(value, Compression):
        value = {"*": value}
    pairs: Any = tuple(value.items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, (list, tuple)):  # as a plan shows it
        pairs = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in pairs)
    if not isinstance(pairs, tuple) or not all(_is_pair(pair) for pair in pairs):
        raise OptionError(
            f"{what}={value!r} must be a codec such as zs.Int8(), or a mapping from name patterns to "
            'codecs such as {"*norm*": None, "*": zs.Int8()}.'
        )
    for _, codec in pairs:
        if codec is not None:
            codec.settings()  # raises for a codec that ranks could not compare
        if isinstance(codec, Codec) and not isinstance(size := codec.wire_bytes(999), int):
            raise OptionError(
                f"{what}: wire_bytes(999) of {codec!r} is {size!r}: return a whole number, such as "
                "(numel + 1) // 2."
            )
    return tuple((str(pattern), codec) for pattern, codec in pairs)


def _is_pair(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    pattern, codec = pair
    return isinstance(pattern, str) and bool(pattern) and (codec is None or isinstance(codec, Compression))


def codec_for(routes: Routes, name: str, shape: Sequence[int]) -> Compression | None:
    """The codec of the first pattern that matches; None: the gradient travels as it is. So does one that has
    not the form that its codec is for: a vector among matrices. And a single number, of which every rank has
    a copy: coded for each beside other values, it would come out otherwise."""
    if not shape or not routes:
        return None
    codec = next((codec for pattern, codec in routes if fnmatchcase(name, pattern)), None)
    if isinstance(codec, LowRank) and not codec.suits(shape):
        return None
    return None if isinstance(codec, Rows) and (len(shape) < 2 or 0 in shape) else codec


def bucket_limit(codec: Compression | None, limit: int) -> int:
    """Bytes of gradients that travel together: of a codec for rows, those of one parameter."""
    return 1 if isinstance(codec, Rows) else limit


def check_patterns(routes: Routes, names: Iterable[str], what: str = "compress") -> None:
    """Every pattern of an option must decide about some parameter: an option is never ignored."""
    every = list(names)
    undecided = list(every)
    for pattern, _ in routes:
        taken = {name for name in undecided if fnmatchcase(name, pattern)}
        if not taken:
            earlier = " that no earlier pattern has taken" if len(undecided) < len(every) else ""
            raise OptionError(
                f'{what}: pattern "{pattern}" matches no {"trainable " if what == "compress" else ""}'
                f"parameter{earlier}. Patterns are tried in the order given."
            )
        undecided = [name for name in undecided if name not in taken]


def check_compress(routes: Routes, sync: Sync, stage: int, offloads: bool = False) -> None:
    """Whether any gradients travel that a codec could make smaller, and the codecs go with the rest."""
    choices = choices_of(sync)
    every = list(routes)
    for choice in choices:
        if isinstance(choice, EveryStep):
            every += routes_of(choice.compress)
    if routes and all(isinstance(choice, Local) for choice in choices):
        raise OptionError(
            "compress= encodes gradients, and with sync=Local(...) none travel: ranks meet by their "
            "parameters. Drop one of the two."
        )
    frozen = [codec for _, codec in every if codec is not None and codec.freezes]
    if frozen and isinstance(sync, Adaptive):
        raise OptionError(
            f"{frozen[0]!r} keeps Adam's second moments from its warm-up on, and Adaptive goes from one way "
            "to another and back: drop freeze=True, or Adaptive."
        )
    if frozen and offloads:
        raise OptionError(
            f"{frozen[0]!r} keeps Adam's second moments beside torch's own, and with offload= the host "
            "updates them: drop freeze=True, or offload=."
        )
    if any(isinstance(codec, Delta) for _, codec in every):
        raise OptionError(
            "Delta(...) sends what has changed in the parameters: pass it as gather=. Gradients are changes "
            "already; the codec inside it is one for compress=."
        )
    late = delays(sync)
    if late and any(isinstance(codec, LowRank) for _, codec in routes):
        raise OptionError(
            "LowRank sends a gradient in rounds that wait for one another, and sync=Delayed() waits for "
            "nothing: drop one of them, or take another codec."
        )
    if late and routes and stage == 0:
        raise OptionError(
            "compress= with sync=Delayed() needs stage 1, 2 or 3: at stage 0 sums would be encoded again for "
            "their way back, and only gradients as they are make it beside the computation. Pass stage=1."
        )


def gather_codec(routes: Routes, name: str) -> Codec | None:
    """The codec of `gather=` for a parameter; None: it travels as it is."""
    codec = next((codec for pattern, codec in routes if fnmatchcase(name, pattern)), None)
    assert codec is None or isinstance(codec, Codec)
    return codec


def check_gather(routes: Routes, stage: int, offloads: bool) -> None:
    """Whether the codecs of `gather=` can carry parameters, at a stage that gathers them."""
    for _, codec in routes:
        if codec is not None:
            _check_carrier(codec, stage, offloads)
    if routes and not any(codec for _, codec in routes):
        raise OptionError(f"gather={dict(routes)!r} names no codec: drop it, or name one such as zs.Int8().")


def _check_carrier(codec: Compression, stage: int, offloads: bool) -> None:
    """One codec of them."""
    if not isinstance(codec, Codec):
        raise OptionError(f"gather={codec!r} must be a codec such as zs.Int8().")
    if codec.state_names or not codec.active(0):
        raise OptionError(
            f"gather={codec!r}: parameters are encoded afresh every step, so a codec for them keeps no state "
            "and needs no warm-up. Pass zs.Int8(), zs.Int4(feedback=False) or zs.Cast(...)."
        )
    if stage == 0:
        raise OptionError(
            "gather= encodes parameters that ranks fetch from one another, and at stage 0 every rank updates "
            "all of them itself: drop it, or pass stage=1, 2 or 3."
        )
    if offloads and isinstance(codec, Delta):
        raise OptionError(
            "gather=Delta(...) keeps what all ranks believe on the device, which offload= is there to spare: "
            "pass gather=zs.Int8(), or drop offload=."
        )
    if offloads and stage < 3:
        raise OptionError(
            f"gather= with offload= needs stage=3, and this is stage {stage}: the host writes the new "
            "weights into the ones that compute, where decoded ones would have to be."
        )
