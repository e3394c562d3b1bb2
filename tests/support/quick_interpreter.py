"""Makes the Triton language's interpreter several times faster, without a change of what it computes.

As shipped (3.6 to 3.9) it replaces the language's functions at every call of a device function, finding them by name
each time, and builds its table of dtypes at every operation.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

__all__ = ["quick_interpreter"]


@contextlib.contextmanager
def quick_interpreter() -> Iterator[None]:
    """Within the block the language's functions stay replaced, so that nothing can be compiled."""
    from triton.runtime import interpreter

    shipped = interpreter._patch_lang
    scopes: dict[Any, Any] = {}

    def patch_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module not in scopes:
            scopes[module] = shipped(function)
        return interpreter._LangPatchScope()

    shipped_dtype = interpreter._get_np_dtype
    of_scalars = functools.cache(shipped_dtype)

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return of_scalars(scalar) if type(scalar) is interpreter.tl.dtype else shipped_dtype(dtype)

    try:
        with (
            patch.object(interpreter, "_patch_lang", patch_once),
            patch.object(interpreter, "_get_np_dtype", np_dtype),
        ):
            yield
    finally:
        for scope in reversed(scopes.values()):
            scope.restore()
