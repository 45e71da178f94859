"""Whether the next gradient norm is expected to stay below the limit, from the norms so far. No torch."""

from __future__ import annotations

import math

UNKNOWN = 0.05  # how far a norm rises, as a difference of logarithms, before two have been seen


class Outlook:
    """`norm` is the last one; `swing` is how far norms have lately risen from one step to the next.

    A norm that is below the limit by less than it rises in a step may exceed it the next time.

    >>> outlook = Outlook(limit=1.0)
    >>> for norm in (0.90, 0.91, 0.92):
    ...     outlook.see(norm)
    >>> outlook.clear
    True
    >>> outlook.see(0.60)  # norms that jump about need more room
    >>> outlook.see(0.92)
    >>> outlook.clear
    False
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.norm, self.swing = 0.0, UNKNOWN

    def see(self, norm: float) -> None:
        """The norm of one more step."""
        if self.norm > 0.0 and 0.0 < norm < math.inf:
            self.swing = (self.swing + max(0.0, math.log(norm / self.norm))) / 2
        self.norm = norm

    @property
    def clear(self) -> bool:
        return math.isinf(self.limit) or self.norm * math.exp(self.swing) < self.limit
