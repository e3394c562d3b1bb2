"""`adapter_config.json` of PEFT: which modules have an adapter, with which rank and scale.  No torch.

The meaning of its keys follows PEFT's `LoraConfig` and `check_target_module_exists`.  Patterns are an operator's, but
may come from anywhere, so matching all of a file's modules has a time limit.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import regex

from inflight.adapters.adapter_error import AdapterError

__all__ = ["PeftConfig", "parse_config"]

_MATCH_SECONDS = 5.0  # for all modules together; patterns in use take microseconds
_MAX_PATTERN = 4096  # characters
_MAX_PATTERNS = 1000  # of a key
_COUNT = re.compile(r"\{[0-9, ]+\}")
_MAX_COUNT = 100  # compiling takes time and memory in proportion to the product of counts

# Keys of variants that compute something else, or train other parts; and what to do about each.
_REFUSED = {
    "use_dora": "DoRA is not served; train without use_dora, or merge the adapter into the checkpoint",
    "use_qalora": "QALoRA is not served; merge the adapter into the checkpoint",
    "lora_bias": "biases are not served; train with lora_bias=false, or merge the adapter into the checkpoint",
    "modules_to_save": "whole modules are not served; merge the adapter into the checkpoint",
    "trainable_token_indices": "trained embeddings are not served; merge the adapter into the checkpoint",
    "layer_replication": "the layers of the checkpoint are served as they are; merge the adapter into the checkpoint",
    "target_parameters": "adapters of experts are not served; merge the adapter into the checkpoint",
    "alora_invocation_tokens": "activated LoRA is not served; an adapter must apply to all tokens",
    "megatron_config": "Megatron's layers are not served; export the adapter for transformers",
}
# Values of init_lora_weights, besides true and false, that leave the checkpoint's weights as they are.
_INITS = ("gaussian", "eva", "orthogonal")
_OUTSIDE_LAYERS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings", "output_layer")


class PeftConfig(msgspec.Struct, frozen=True):
    """The keys that matter, as PEFT writes them; others have no effect on what an adapter computes."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    bias: str = "none"
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None

    def matching(self, modules: Iterable[str]) -> dict[str, tuple[int, float]]:
        """Rank, and scale of B A, of each module: paths in the model, such as `model.layers.0.mlp.up_proj`.

        Raises:
            AdapterError: a module is not among the targets, or a pattern cannot be matched in time.
        """
        patterns = _Patterns()
        found = {}
        for module in modules:
            if not self._is_target(module, patterns):
                raise AdapterError(
                    f"it has weights for {module}, which its target_modules, exclude_modules and layers_to_transform "
                    "leave out; the files are of different adapters: save it again"
                )
            rank = patterns.value(self.rank_pattern or {}, module, self.r)
            alpha = patterns.value(self.alpha_pattern or {}, module, self.lora_alpha)
            found[module] = rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)
        return found

    def _is_target(self, module: str, patterns: _Patterns) -> bool:
        excluded, target = self.exclude_modules, self.target_modules
        if excluded and _is_named(excluded, module, patterns):
            return False
        if target is None or target == "all-linear":
            return True
        if not _is_named(target, module, patterns):
            return False
        if isinstance(target, str) or self.layers_to_transform in (None, []) or module in patterns.names(target):
            return True
        layer = self._layer(module, patterns)
        layers = self.layers_to_transform
        return layer in (layers if isinstance(layers, list) else [layers])

    def _layer(self, module: str, patterns: _Patterns) -> int | None:
        """The layer's number in the module's path; None: there is none."""
        names = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        for name in names or [r"[^.]*"]:
            found = patterns.match(rf".*\.{name}\.([0-9]{{1,9}})\.", module)
            if found is not None:
                return int(found[len(found.groups())])
        return None


class _Patterns:
    """Matches within `_MATCH_SECONDS`, all calls together; but for the one in which a pattern is compiled."""

    def __init__(self) -> None:
        self._end = time.monotonic() + _MATCH_SECONDS
        self._compiled: dict[str, Any] = {}
        self._names: dict[int, frozenset[str]] = {}  # by the list's id(); the configuration keeps the lists

    def match(self, pattern: str, text: str, whole: bool = False) -> Any:
        """`re.match`, or `re.fullmatch`.  Raises AdapterError."""
        try:
            self._left()
            compiled = self._compiled.get(pattern)
            if compiled is None:
                compiled = self._compiled[pattern] = regex.compile(_without_many_counts(pattern))
            return (compiled.fullmatch if whole else compiled.match)(text, timeout=self._left(), concurrent=True)
        except TimeoutError:
            raise AdapterError(
                f"the pattern {pattern[:100]!r} takes more than {_MATCH_SECONDS:g} s to match; simplify it"
            ) from None
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise AdapterError(f"{pattern[:100]!r} is no regular expression: {error}; correct it") from None

    def _left(self) -> float:
        """Seconds; raises TimeoutError at the end."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def names(self, given: list[str]) -> frozenset[str]:
        found = self._names.get(id(given))
        if found is None:
            found = self._names[id(given)] = frozenset(given)
        return found

    def value(self, of_pattern: dict[str, Any], module: str, otherwise: Any) -> Any:
        """The value of the first pattern that matches an end of the path, from a dot on."""
        for pattern, value in of_pattern.items():
            if self.match(rf"(.*\.)?({pattern})$", module) is not None:
                return value
        return otherwise


def _without_many_counts(pattern: str) -> str:
    counts = _COUNT.findall(pattern)
    if len(counts) > 1 or any(int(number) > _MAX_COUNT for each in counts for number in re.findall("[0-9]+", each)):
        raise AdapterError(
            f"the pattern {pattern[:100]!r} has counts {', '.join(counts)[:100]}: one of at most {_MAX_COUNT} is "
            "allowed; write it without counts"
        )
    return pattern


def _is_named(names: list[str] | str, module: str, patterns: _Patterns) -> bool:
    if isinstance(names, str):
        return patterns.match(names, module, whole=True) is not None
    found = patterns.names(names)
    if module in found:
        return True
    end = module[-_MAX_PATTERN - 1 :]  # no name is longer
    return any(end[at + 1 :] in found for at, letter in enumerate(end) if letter == ".")


def parse_config(text: bytes) -> PeftConfig:
    """The adapter's configuration, if it is one that is served.

    Raises:
        AdapterError: not JSON, another type, or a variant that is not served.
    """
    try:
        raw = msgspec.json.decode(text)
        config = msgspec.convert(raw, PeftConfig)
    except (ValueError, RecursionError) as error:  # msgspec's and Unicode's are ValueErrors
        raise AdapterError(f"adapter_config.json is not PEFT's: {_line(error)}; save the adapter again") from None
    if config.peft_type != "LORA":
        raise AdapterError(f"peft_type={_line(config.peft_type)!r} is not served: must be 'LORA'")
    if config.bias != "none":
        raise AdapterError(f"bias={_line(config.bias)!r} is not served: train with bias='none', or merge the adapter")
    for key, value in raw.items():
        why = _REFUSED.get(key)
        if why is None and key.startswith("use_") and key != "use_rslora":
            why = "it is not served; merge the adapter into the checkpoint"
        if why is not None and value:
            raise AdapterError(f"{_line(key)}={_line(value)}: {why}")
    _check_init(raw.get("init_lora_weights"))
    _check_numbers(config)
    _check_targets(config)
    return config


def _check_init(init: Any) -> None:
    """PiSSA, OLoRA, CorDA, LoftQ and the like subtract the first matrices from the weights that are trained on."""
    if isinstance(init, str) and init.lower() not in _INITS:
        raise AdapterError(
            f"init_lora_weights={_line(init)!r}: the checkpoint's own weights were changed when the adapter was made; "
            "save it with PEFT's path_initial_model_for_weight_conversion, or merge it into the changed checkpoint"
        )


def _check_numbers(config: PeftConfig) -> None:
    for name, rank in {"r": config.r, **(config.rank_pattern or {})}.items():
        if not 1 <= rank <= 2**20:
            raise AdapterError(f"the rank of {_line(name)!r} is {rank}: must be at least 1; save the adapter again")
    for name, alpha in {"lora_alpha": config.lora_alpha, **(config.alpha_pattern or {})}.items():
        if not abs(alpha) <= 1e9:
            raise AdapterError(f"the alpha of {_line(name)!r} is {alpha}: must be a number of usual size; correct it")
    layers = [config.layers_pattern] if isinstance(config.layers_pattern, str) else config.layers_pattern
    patterns: list[str] = []
    for key, given in (
        ("rank_pattern", config.rank_pattern),
        ("alpha_pattern", config.alpha_pattern),
        ("layers_pattern", layers),
    ):
        if given and len(given) > _MAX_PATTERNS:
            raise AdapterError(f"{key} has {len(given)} patterns: at most {_MAX_PATTERNS}; join some with |")
        patterns += given or ()
    for value in (config.target_modules, config.exclude_modules):
        patterns += [value] if isinstance(value, str) else value or ()
    longest = max(map(len, patterns), default=0)
    if longest > _MAX_PATTERN:
        raise AdapterError(f"a pattern of its modules has {longest} characters: at most {_MAX_PATTERN}; simplify it")


def _check_targets(config: PeftConfig) -> None:
    targets = config.target_modules if isinstance(config.target_modules, list) else []
    outside = [name for name in targets if name.rsplit(".", 1)[-1] in _OUTSIDE_LAYERS]
    if outside:
        raise AdapterError(
            f"target_modules has {_line(outside[0])!r}: adapters of embeddings and of the head are not served; train "
            "without it, or merge the adapter into the checkpoint"
        )


def _line(value: Any) -> str:
    """The start of a value in one line."""
    return " ".join(ascii(str(value))[1:-1].split())[:200]
