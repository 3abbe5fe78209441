"""A memory for what is made of large tables: few, immutable, and the same again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class IdentityCache(Generic[T]):
    """A function of immutable objects with its last results, told by identity.

    To compare or hash a table of 1,500 sites costs as much as what is made of it. Equal tables that
    are not one object are only slower.

    Args:
        function: what to remember.
        size: so many results are kept; then all are forgotten.
    """

    def __init__(self, function: Callable[..., T], size: int) -> None:
        self._function, self._size = function, size
        self._known: dict[tuple[int, ...], tuple[tuple[object, ...], T]] = {}

    def __call__(self, *objects: object) -> T:
        """Return the function's result, made anew if these objects are not remembered."""
        key = tuple(map(id, objects))
        known = self._known.get(key)
        if known is None:  # what is known is held, so that its id is nobody else's
            if len(self._known) >= self._size:
                self._known.clear()
            known = self._known[key] = objects, self._function(*objects)
        return known[1]
