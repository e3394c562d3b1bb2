"""Makes the Triton language's interpreter many times faster, without a change of what it computes.

As shipped (3.6 to 3.9) it replaces the language's functions at every call of a device function, finding them by name
each time, builds its table of dtypes at every operation, and finds the types of every operation anew: see
`interpreter_plans`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np

__all__ = ["quick_interpreter"]


@contextlib.contextmanager
def quick_interpreter() -> Iterator[None]:
    """Within the block the language's functions stay replaced, so that nothing can be compiled.

    Other replacements of parts of the interpreter have to be in effect when the block begins.
    """
    from triton.runtime import interpreter

    shipped = interpreter._patch_lang
    scopes: dict[Any, Any] = {}
    plans = _plans_of(interpreter.InterpreterBuilder.create_fmul, interpreter._convert_float)

    def patch_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module not in scopes:
            scopes[module] = shipped(function)
            _watch(plans)
        return interpreter._LangPatchScope()

    shipped_attr = interpreter._patch_attr

    def patch_attr(owner: Any, name: str, member: Any, *others: Any) -> None:
        shipped_attr(owner, name, member, *others)
        setattr(owner, name, plans.quick(member, is_builtin=True))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter._patch_lang(self.fn)
        try:
            return plans.quick(self.rewrite())(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    shipped_dtype = interpreter._get_np_dtype
    of_scalars = functools.cache(shipped_dtype)

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return of_scalars(scalar) if type(scalar) is interpreter.tl.dtype else shipped_dtype(dtype)

    semantic = interpreter.interpreter_semantic
    semantic.to_tensor = plans.to_tensor
    semantic.binary_op_sanitize_overflow_impl = lambda *args: None  # it computes what only `debug` would report
    try:
        with (
            patch.object(interpreter, "_patch_lang", patch_once),
            patch.object(interpreter, "_patch_attr", patch_attr),
            patch.object(interpreter, "_get_np_dtype", np_dtype),
            patch.object(interpreter.InterpretedFunction, "__call__", call),
            patch.object(interpreter.GridExecutor, "__call__", _run_grid(plans)),
            patch.object(interpreter.TensorHandle, "__init__", _new_handle),
            patch.object(interpreter.ReduceOps, "min_max", _min_max(interpreter.ReduceOps.min_max)),
            patch.object(interpreter.ReduceScanOpInterface, "apply", _recorded_apply(plans)),
        ):
            yield
    finally:
        del semantic.to_tensor, semantic.binary_op_sanitize_overflow_impl
        for scope in reversed(scopes.values()):
            scope.restore()


@functools.cache
def _plans_of(*replaced: Any) -> Any:
    """Plans hold for one way to multiply and to convert."""
    from interpreter_plans import Plans
    from triton.runtime import interpreter

    return Plans(interpreter.interpreter_semantic)


def _watch(plans: Any) -> None:
    """Tensors report that a program looks at their value; `tl.range` gives tensors, as on a GPU."""
    import triton.language as tl

    def as_bool(self: Any) -> bool:
        plans.looked_at(self)
        data = self.handle.data
        return bool(data) if data.size == 1 else True

    def as_index(self: Any) -> int:
        plans.looked_at(self)
        return int(self.handle.data.squeeze())

    def loop(first: Any, end: Any = None, step: Any = None, **options: Any) -> Any:
        bounds: Any = (0, first) if end is None else (first, end)
        numbers = range(bounds[0], bounds[1], 1 if step is None else step)
        if any(isinstance(bound, tl.tensor) for bound in bounds):
            return map(plans.to_tensor, numbers)
        return numbers

    tl.tensor.__bool__, tl.tensor.__index__ = as_bool, as_index
    tl.range = tl.core.range = loop


def _new_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _run_grid(plans: Any) -> Callable[..., None]:
    """`GridExecutor.__call__`"""
    from triton import knobs
    from triton.runtime import interpreter

    def run(self: Any, *args_dev: Any, **kwargs: Any) -> None:
        spec = inspect.getfullargspec(self.fn)
        kwargs = {key: value for key, value in kwargs.items() if key in spec.args or key in spec.kwonlyargs}
        args_host, kwargs_host = self._init_args_hst(args_dev, kwargs)
        for hook in self.pre_run_hooks:
            hook(*args_host, **kwargs_host)
        interpreter._patch_lang(self.fn)
        given = inspect.getcallargs(self.fn, *args_host, **kwargs_host)
        args = {key: x if key in self.constexprs else interpreter._implicit_cvt(x) for key, x in given.items()}
        grid = tuple(self.grid(args) if callable(self.grid) else self.grid)
        grid = grid + (1,) * (3 - len(grid))
        interpreter.interpreter_builder.set_grid_dim(*grid)
        program = plans.quick(self.fn)
        try:
            for index in np.ndindex(*grid):
                interpreter.interpreter_builder.set_grid_idx(*index)
                program(**args)
        except Exception as error:
            if knobs.compilation.front_end_debugging:
                raise
            raise interpreter.InterpreterError(repr(error)) from error
        self._restore_args_dev(args_dev, args_host, kwargs, kwargs_host)

    return run


def _recorded_apply(plans: Any) -> Callable[[Any, Any], Any]:
    """`ReduceScanOpInterface.apply`, which does not use the builder."""
    from interpreter_plans import new_tensor

    def apply(self: Any, inputs: Any) -> Any:
        if not isinstance(inputs, tuple):
            return apply(self, (inputs,))[0]
        self.check_tensor(inputs)
        templates = [dict(value.__dict__, handle=None) for value in inputs]
        made: list[Any] = []

        def again(*handles: Any) -> Any:
            results = self.apply_impl(tuple(map(new_tensor, templates, handles)))
            results = tuple(results) if isinstance(results, (list, tuple)) else (results,)
            if not made:
                made.extend(dict(value.__dict__, handle=None) for value in results)
            return tuple(value.handle for value in results)

        handles = plans.operation("reduce", again, *(value.handle for value in inputs))
        return tuple(map(new_tensor, made, handles))

    return apply


def _min_max(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """`ReduceOps.min_max`; numpy's functions for arrays with NaN look for NaN first."""
    quick = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def min_max(self: Any, x: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        return shipped(self, x, quick.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    return min_max
