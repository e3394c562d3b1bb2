"""Records what a function of the Triton language does in the interpreter, and does it again for other tensors.

The interpreter finds the types, conversions and broadcasts of every operation anew, in every program.  All of it
depends on the types of the tensors and on the constants only, as it does for the compiler.  So the first call with some
types and constants records the operations on data that it amounts to, its *plan*, and later calls run those.  A
function that looks at a tensor's value, as a loop with a bound from memory does, has no plan; the functions that it
calls have.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

__all__ = ["Plans", "new_tensor"]

_tensor, _constexpr = tl.core.tensor, tl.core.constexpr
# The result or the effect of these depends on more than their arguments.
_NOT_CONSTANT = ("program", "load", "store", "atomic", "assert", "assume", "print", "barrier", "descriptor")
_NO_PLAN = object()
_MOST_ATTEMPTS = 3  # to record a function that looked at values


class _Unknown(Exception):
    """An argument or a result that a plan cannot contain."""


class _Recorder:
    """Stands for the builder while a function is recorded: each of its calls runs, and is kept."""

    def __init__(self, builder: Any, inputs: list[TensorHandle]) -> None:
        self._builder = builder
        self._places = {id(handle): place for place, handle in enumerate(inputs)}
        self._kept: list[Any] = list(inputs)  # an id is good for as long as its object lives
        self.values: list[Any] = [None] * len(inputs)  # a plan's constants, by place
        self.calls: list[tuple[Callable[..., Any], list[int], dict[str, Any], Any]] = []
        self._variable = set(range(len(inputs)))
        self.is_usable, self.has_looked = True, False

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._builder, name)
        return functools.partial(self.call, name, value) if callable(value) else value

    def place_of(self, handle: TensorHandle) -> int:
        try:
            return self._places[id(handle)]
        except KeyError:
            raise _Unknown from None

    def depends_on_data(self, handle: TensorHandle) -> bool:
        return self._places.get(id(handle), -1) in self._variable or id(handle) not in self._places

    def _new_place(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if not isinstance(result, (TensorHandle, tuple, type(None))):
            return result  # a type
        try:
            self._record(name, method, args, kwargs, result)
        except _Unknown:
            self.is_usable = False
        return result

    def _record(self, name: str, method: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        handles = [self.place_of(value) for value in (*args, *kwargs.values()) if isinstance(value, TensorHandle)]
        if any(isinstance(value, (list, tuple)) and any(isinstance(x, TensorHandle) for x in value) for value in args):
            raise _Unknown
        if any(isinstance(value, TensorHandle) for value in kwargs.values()):
            raise _Unknown
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        self._kept.extend(results)
        is_constant = not any(word in name for word in _NOT_CONSTANT) and not self._variable.intersection(handles)
        outs = [self._new_place(handle if is_constant else None) for handle in results]
        self._places.update((id(handle), place) for handle, place in zip(results, outs))
        if is_constant:
            return
        self._variable.update(outs)
        places = [self.place_of(x) if isinstance(x, TensorHandle) else self._new_place(x) for x in args]
        self.calls.append((method, places, kwargs, outs[0] if isinstance(result, TensorHandle) else outs))


class _Plan:
    """The recorded calls, and how to make the function's result of theirs."""

    def __init__(self, recorder: _Recorder, result: Callable[[Any, list[Any]], Any]) -> None:
        self._values, self._calls, self._result = recorder.values, recorder.calls, result

    def run(self, tensors: list[Any]) -> Any:
        values = self._values.copy()
        values[: len(tensors)] = [tensor.handle for tensor in tensors]
        for method, places, kwargs, out in self._calls:
            made = method(*[values[place] for place in places], **kwargs)
            if type(out) is int:
                values[out] = made
            else:
                for place, handle in zip(out, made or ()):
                    values[place] = handle
        return self._result(tensors, values)


class Plans:
    """All plans for one state of the interpreter, whose functions are made quick while they are in use.

    Args:
        semantic: the interpreter's, whose builder is replaced while a function is recorded.
    """

    def __init__(self, semantic: Any) -> None:
        self._semantic, self._builder = semantic, semantic.builder
        self._types: dict[Any, Any] = {}
        self._known: dict[int, Any] = {}  # the types above by id, so that none of them is ever freed
        self._by_function: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._constants: dict[Any, Any] = {}
        self._recorder: _Recorder | None = None
        self._shipped_to_tensor = type(semantic).to_tensor

    # -- keys -------------------------------------------------------------------------------------

    def _canonical(self, kind: Any) -> Any:
        found = self._types.setdefault((type(kind), str(kind)), kind)
        self._known[id(found)] = found
        return found

    def _key_of(self, value: Any, tensors: list[Any]) -> Any:
        kind = type(value)
        if kind is _tensor:
            if id(value.type) not in self._known:
                value.type = self._canonical(value.type)
            tensors.append(value)
            return id(value.type)
        if kind is int or kind is bool or kind is str or value is None:
            return kind, value
        if kind is _constexpr:
            return _constexpr, self._key_of(value.value, tensors)
        if kind is float:
            return kind, value.hex()  # 0.0 == -0.0
        if kind is tuple or kind is list:
            return kind, tuple([self._key_of(item, tensors) for item in value])
        if kind is slice:
            return kind, self._key_of((value.start, value.stop, value.step), tensors)
        if kind is tl.core.tuple and value.type.fields is None:
            return kind, tuple([self._key_of(item, tensors) for item in value.values])
        if isinstance(value, tl.core.dtype):
            return kind, str(value)
        if kind is InterpretedFunction or kind is types.FunctionType or kind.__module__.startswith("triton._C"):
            return kind, value
        raise _Unknown

    # -- calls ------------------------------------------------------------------------------------

    def quick(self, function: Callable[..., Any], is_builtin: bool = False) -> Callable[..., Any]:
        """`function`, recorded at its first call with arguments of some types."""
        if function not in self._by_function:
            self._by_function[function] = self._quick(function, is_builtin)
        return self._by_function[function]

    def _quick(self, function: Callable[..., Any], is_builtin: bool) -> Callable[..., Any]:
        plans: dict[Any, Any] = {}
        attempts = [0]

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_builtin:
                kwargs.pop("_semantic", None)
            if self._recorder is not None or attempts[0] == _MOST_ATTEMPTS:
                return direct(*args, **kwargs)
            tensors: list[Any] = []
            try:
                key = tuple([self._key_of(value, tensors) for value in args])
                if kwargs:
                    key = key, tuple([(name, self._key_of(value, tensors)) for name, value in kwargs.items()])
            except _Unknown:
                return direct(*args, **kwargs)
            plan = plans.get(key)
            if plan is None:
                result, has_looked = self._record(plans, key, direct, args, kwargs)
                attempts[0] += has_looked
                return result
            if plan is _NO_PLAN:
                return direct(*args, **kwargs)
            return plan.run(tensors)

        def direct(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs, _semantic=self._semantic) if is_builtin else function(*args, **kwargs)

        return call

    def _record(
        self, plans: dict[Any, Any], key: Any, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, bool]:
        # A tensor that is passed twice becomes two: at the next call they can differ.
        originals: list[Any] = []
        copies: list[Any] = []

        def copied(value: Any) -> Any:
            if type(value) is _tensor:
                originals.append(value)
                copies.append(new_tensor(value.__dict__, TensorHandle(value.handle.data, value.handle.dtype)))
                return copies[-1]
            if type(value) is tuple or type(value) is list:
                return type(value)(map(copied, value))
            if type(value) is tl.core.tuple:
                return tl.core.tuple(list(map(copied, value.values)), value.type)
            return value

        new_args = [copied(value) for value in args]
        new_kwargs = {name: copied(value) for name, value in kwargs.items()}
        recorder = _Recorder(self._builder, [copy.handle for copy in copies])
        with self._recording(recorder):
            result = function(*new_args, **new_kwargs)
        by_identity = {id(copy): index for index, copy in enumerate(copies)}
        try:
            made = self._maker(recorder, result, by_identity)
            plans[key] = _Plan(recorder, made) if recorder.is_usable else _NO_PLAN
        except _Unknown:
            plans[key] = _NO_PLAN
        return result, recorder.has_looked

    @contextlib.contextmanager
    def _recording(self, recorder: _Recorder | None) -> Iterator[None]:
        outer = self._recorder
        self._recorder, self._semantic.builder = recorder, recorder or self._builder
        try:
            yield
        finally:
            self._recorder, self._semantic.builder = outer, outer or self._builder

    def _maker(self, recorder: _Recorder, result: Any, inputs: dict[int, int]) -> Callable[[list[Any], list[Any]], Any]:
        """A function of a call's tensors and of the values by place."""
        if id(result) in inputs:
            index = inputs[id(result)]
            return lambda tensors, values: tensors[index]
        if type(result) is _tensor:
            place = recorder.place_of(result.handle)
            template = result.__dict__ | {"type": self._canonical(result.type)}
            return lambda tensors, values: new_tensor(template, values[place])
        if type(result) is tuple or type(result) is list:
            kind, parts = type(result), [self._maker(recorder, item, inputs) for item in result]
            return lambda tensors, values: kind([part(tensors, values) for part in parts])
        if type(result) is tl.core.tuple and result.type.fields is None:
            parts = [self._maker(recorder, item, inputs) for item in result.values]
            return lambda tensors, values: tl.core.tuple([part(tensors, values) for part in parts])
        if result is None or isinstance(result, (_constexpr, tl.core.dtype, int, float, str)):
            return lambda tensors, values: result
        raise _Unknown

    # -- what the language's functions call -------------------------------------------------------

    def looked_at(self, tensor: Any) -> None:
        """The program reads a tensor's value: what it does next depends on it."""
        if self._recorder is not None and self._recorder.depends_on_data(tensor.handle):
            self._recorder.is_usable, self._recorder.has_looked = False, True

    def to_tensor(self, value: Any, check_type: bool = True) -> Any:
        """`TritonSemantic.to_tensor`, which every assignment of a program calls."""
        kind = type(value)
        if kind is _tensor:
            return value
        if self._recorder is not None or kind not in (int, float, bool):
            return self._shipped_to_tensor(self._semantic, value, check_type)
        key = kind, value.hex() if kind is float else value
        if key not in self._constants:
            self._constants[key] = self._shipped_to_tensor(self._semantic, value, check_type)
        return self._constants[key]

    def operation(self, name: str, function: Callable[..., Any], *handles: TensorHandle) -> Any:
        """Run an operation on handles that is not the builder's, and record it."""
        recorder = self._recorder
        if recorder is None:
            return function(*handles)

        def unrecorded(*handles: TensorHandle) -> Any:
            with self._recording(None):
                return function(*handles)

        return recorder.call(name, unrecorded, *handles)


def new_tensor(template: dict[str, Any], handle: TensorHandle) -> Any:
    """A tensor with the attributes `template`; the language's own constructor takes longer than most operations."""
    made = _tensor.__new__(_tensor)
    made.__dict__.update(template)
    made.handle = handle
    return made
