"""Plain parameters that wait, before they are used, for the host that may be updating them.

On one rank `model.parameters()` are plain parameters over memory that the host's workers write beside
the loop. Sharded DTensors say when they are used (`dtensor.WriteVersions`); plain ones are given a class
of their own for the length of a run, which asks before everything that looks at values or writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn, no_grad
from torch._C import DisableTorchFunctionSubclass
from torch.optim import optimizer
from torch.utils import _foreach_utils

_ATTRIBUTES = (
    *(
        "grad",
        "requires_grad",
        "shape",
        "dtype",
        "device",
        "layout",
        "is_leaf",
        "grad_fn",
        "_version",
        "ndim",
    ),
    *("is_cuda", "is_cpu", "is_sparse", "is_meta", "grad_dtype", "_backward_hooks", "_grad", "itemsize"),
    *("nbytes", "retains_grad", "is_quantized", "is_nested", "_post_accumulate_grad_hooks", "output_nr"),
)
_METHODS = (
    *(
        "size",
        "dim",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "storage_offset",
        "data_ptr",
        "is_complex",
    ),
    *("is_floating_point", "is_contiguous", "register_hook", "register_post_accumulate_grad_hook", "__len__"),
    *("requires_grad_", "get_device", "is_conj", "is_neg", "is_inference", "is_same_size", "ndimension"),
)


def _harmless() -> set[Any]:
    """What looks at no values."""
    owners = [getattr(Tensor, name, None) for name in _ATTRIBUTES]
    found = {getattr(owner, way) for owner in owners for way in ("__get__", "__set__") if hasattr(owner, way)}
    return found | {getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)}


_HARMLESS = _harmless()
# Of these no graph leads to the parameter.
_DETACHED = {Tensor.detach, Tensor.data.__get__, Tensor.data.__set__}  # type: ignore[attr-defined]


class GuardedParam(nn.Parameter):
    """Each run has a subclass, whose `before_use` waits."""

    before_use: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            with no_grad() if func in _DETACHED else nullcontext():
                cls.before_use()
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found


class ParamGuard:
    """The parameters of one run whose use waits for the host."""

    def __init__(self, before_use: Callable[[], None]) -> None:
        self._kind: Any = type("GuardedParam", (GuardedParam,), {"before_use": staticmethod(before_use)})
        self._params: list[nn.Parameter] = []

    def take(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether all of them are plain, and wait from now on."""
        found = list(params)
        if any(type(param) is not nn.Parameter for param in found):
            return False
        for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
            known.append(self._kind)
        for param in found:
            param.__class__ = self._kind
        self._params = found
        return True

    def give_back(self) -> None:
        """They are plain parameters again."""
        for param in self._params:
            if type(param) is self._kind:
                param.__class__ = nn.Parameter
        for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
            if self._kind in known:
                known.remove(self._kind)
        self._params = []
        # Torch and autograd may know the class for longer: it must not lead to the run.
        self._kind.before_use = staticmethod(lambda: None)
