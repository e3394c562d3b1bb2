"""From the hidden states of a checkpoint to its vectors: what its files say about pooling, its heads, its labels.

Read beside the model, whichever way that is loaded: modules.json and the folders that it names (sentence-transformers'
format), the `score` head of a classifier, and two rows of the language model head for a reranker whose answer is a
token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, normalize

from inflight.config import EngineConfig
from inflight.engine.pooler_facts import PoolerFacts
from inflight.engine.pooling import Pooling
from inflight.hub import checkpoint_file
from inflight.loading.checkpoint.headless import is_classifier, is_encoder, is_headless, json_of, tensors_of, text_of
from inflight.loading.load_errors import LoadError
from inflight.pooler_config import PoolerConfig

__all__ = ["Pooler", "load_pooler"]

_SCORE = "score.weight"
_KINDS = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls", "mean": "mean", "cls": "cls"}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": torch.nn.functional.gelu,
    "Sigmoid": torch.sigmoid,
}
_CHANGED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
# As Qwen3-Reranker's model card gives it.
_QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


class _Unsupported(ValueError):
    """The checkpoint's vectors are made in a way that is not supported; the message says which."""


@dataclass
class _Modules:
    """The content of modules.json.

    Attributes:
        kind: None: nothing.
        normalizes: None: there is no modules.json.
        dense: weight, bias and activation of each layer behind the pooling.
        tokens: (false, true) token ids of a score; a false one of None is none.
    """

    kind: str | None = None
    normalizes: bool | None = None
    dense: list[tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]] = field(default_factory=list)
    tokens: tuple[int | None, int] | None = None


class Pooler:
    """Vectors of pooled hidden states.

    Args:
        facts: for frontends.
        modules: layers of an embedding.
        head: from float32 [R, H] to the logits of scores or classes, [R, labels]; None: there is none.
        activation: of its logits.
    """

    def __init__(
        self,
        facts: PoolerFacts,
        modules: _Modules,
        head: Callable[[Tensor], Tensor] | None,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        self.facts = facts
        self._dense = modules.dense
        self._head = head
        self._activation = activation

    def __call__(self, hidden: Tensor, pooling: Pooling) -> Tensor:
        """float32 [R, H] -> float32 [R, D], for a task of the checkpoint."""
        if pooling.task != "embed" and self._head is not None:
            logits = self._head(hidden)
            return self._activation(logits) if pooling.activates else logits
        for weight, bias, activation in self._dense:
            hidden = activation(linear(hidden, weight, bias))
        hidden = hidden[:, : pooling.dimensions or None]
        return normalize(hidden, dim=1) if pooling.activates else hidden


def load_pooler(
    config: EngineConfig,
    yields_hidden: bool,
    device: torch.device,
    own_head: Callable[[Tensor], Tensor] | None = None,
) -> Pooler:
    """The pooler of a checkpoint; one without tasks if its vectors cannot be made.

    Args:
        yields_hidden: the loaded model shows its hidden states.
        own_head: of the loaded model, for scores or classes; None: what the files say.

    Raises:
        LoadError: an option asks for what the checkpoint does not have, or a file of it is damaged.
    """
    try:
        return _load(config, yields_hidden, device, own_head)
    except _Unsupported as why:
        return Pooler(PoolerFacts(lacking=str(why), generates=not is_headless(config)), _Modules(), None, _same)
    except (OSError, SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{config.model!r}: its pooling cannot be read: {type(error).__name__}: {error}") from error


def _load(
    config: EngineConfig, yields_hidden: bool, device: torch.device, own_head: Callable[[Tensor], Tensor] | None
) -> Pooler:
    if not yields_hidden:
        raise _Unsupported("its model does not show the hidden states that its head takes")
    values = json_of(config, "config.json")
    text = text_of(values if isinstance(values, dict) else {})
    size = next(
        (text[name] for name in ("hidden_size", "n_embd", "d_model", "dim") if isinstance(text.get(name), int)), None
    )
    if size is None or not isinstance(values, dict):
        raise _Unsupported("its config.json has no hidden_size")
    modules = _modules_of(config, device)
    if own_head is not None:
        return _of_classifier(config, values, modules, own_head)
    head, labels, activation = _head_of(config, values, text, modules)
    if head is not None and head.shape[1] != size:
        raise LoadError(f"{config.model!r}: {_SCORE} has {head.shape[1]} inputs, and hidden_size is {size}")
    pooler, overrides = config.pooler_config, config.hf_overrides
    if head is None and (pooler.score_template or overrides.is_original_qwen3_reranker):
        raise LoadError(
            f"{config.model!r}: score_template and is_original_qwen3_reranker are for rerankers, and its scores are "
            "cosines of embeddings: set classifier_from_token in hf_overrides, too, or leave them out"
        )
    kind = (
        pooler.pooling_type.lower()
        if pooler.pooling_type
        else modules.kind or ("mean" if is_encoder(values) else "last")
    )
    normalizes = modules.normalizes if pooler.normalize is None else pooler.normalize
    tasks = ["embed", *(["score"] if head is None or len(head) == 1 else []), *(["classify"] if labels else [])]
    template = _template_of(config)
    prompts = json_of(config, "config_sentence_transformers.json")
    given = prompts.get("prompts") if isinstance(prompts, dict) else None
    facts = PoolerFacts(
        tasks=tasks,
        kind=kind,
        size=len(modules.dense[-1][0]) if modules.dense else size,
        normalizes=normalizes is not False,
        matryoshka=_matryoshka(values, text, overrides.is_matryoshka, overrides.matryoshka_dimensions),
        labels=labels,
        pairs="cosine" if head is None else "template" if template else "tokenizer",
        template=template,
        prompts={str(name): str(prompt) for name, prompt in (given or {}).items() if prompt},
        generates=not is_headless(config),
        lowers=_lowers(config),
    )
    return Pooler(facts, modules, None if head is None else partial(linear, weight=head.to(device)), activation)


def _of_classifier(
    config: EngineConfig, values: Mapping[str, Any], modules: _Modules, head: Callable[[Tensor], Tensor]
) -> Pooler:
    """The pooler of an encoder with a head of its own, which says what it reads."""
    if config.pooler_config != PoolerConfig() or config.hf_overrides.classifier_from_token is not None:
        raise LoadError(
            f"{config.model!r}: its head says how hidden states are pooled, and the tokenizer how pairs are formatted: "
            "leave out pooler_config and classifier_from_token"
        )
    count = len(values.get("id2label") or {}) or int(values.get("num_labels", 2))
    facts = PoolerFacts(
        tasks=[*(["score"] if count == 1 else []), "classify"],
        kind="mean" if values.get("classifier_pooling") == "mean" else "cls",
        labels=_labels(values, count),
        pairs="tokenizer",
        generates=False,
        lowers=_lowers(config),
    )
    return Pooler(facts, modules, head, _activation_of_pairs(values) or _activation(values, count))


def _modules_of(config: EngineConfig, device: torch.device) -> _Modules:
    listed = json_of(config, "modules.json")
    found = _Modules()
    if not isinstance(listed, list):
        return found
    found.normalizes = False
    for module in listed:
        name, path = str(module["type"]).rpartition(".")[2], str(module.get("path") or "")
        options: Any = json_of(config, f"{path}/config.json") if path else {}
        options = options if isinstance(options, dict) else {}
        if name == "Pooling":
            found.kind = _kind_of(options)
        elif name == "Normalize":
            found.normalizes = True
        elif name == "Dense":
            found.dense.append(_dense_of(config, path, options, device))
        elif name == "LogitScore":
            found.tokens = options.get("false_token_id"), int(options["true_token_id"])
        elif name != "Transformer":
            raise _Unsupported(f"its modules.json has a module of type {name}")
    return found


def _kind_of(options: Mapping[str, Any]) -> str:
    named = options.get("pooling_mode")
    modes = (
        [named]
        if isinstance(named, str)
        else [
            key.removeprefix("pooling_mode_")
            for key, value in options.items()
            if key.startswith("pooling_mode_") and value
        ]
    )
    if len(modes) != 1 or modes[0] not in _KINDS:
        got = " and ".join(modes) or "unknown"
        raise _Unsupported(f"its pooling is {got}, not lasttoken, mean_tokens or cls_token")
    if options.get("include_prompt") is False:
        raise _Unsupported("its pooling leaves out the tokens of the prompt")
    return _KINDS[modes[0]]


def _dense_of(
    config: EngineConfig, path: str, options: Mapping[str, Any], device: torch.device
) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
    name = str(options.get("activation_function", "Identity")).rpartition(".")[2]
    file = checkpoint_file(config.model, f"{path}/model.safetensors", config.revision)
    if name not in _ACTIVATIONS or file is None:
        why = f"has no {path}/model.safetensors" if file is None else f"layer {path} has the activation {name}"
        raise _Unsupported(f"its {why}")
    tensors = {key: value.float().to(device) for key, value in load_file(file).items()}
    return tensors["linear.weight"], tensors.get("linear.bias"), _ACTIVATIONS[name]


def _head_of(
    config: EngineConfig, values: Mapping[str, Any], text: Mapping[str, Any], modules: _Modules
) -> tuple[Tensor | None, list[str], Callable[[Tensor], Tensor]]:
    """The head of scores and classes, its labels, and what makes probabilities of its logits."""
    if is_classifier(values):
        files = tensors_of(config)
        if config.load_format == "dummy":
            count = len(values.get("id2label") or {}) or int(values.get("num_labels", 2))
            size = int(text["hidden_size"])
            head = 0.02 * torch.randn(count, size, generator=torch.Generator().manual_seed(0))
        elif _SCORE in files.dtypes:
            head = files.read([_SCORE])[_SCORE].float()
        else:
            raise _Unsupported(f"its safetensors files have no {_SCORE}")
        return head, _labels(values, len(head)), _activation(values, len(head))
    tokens = _answer_tokens(config, modules)
    if tokens is None:
        return None, [], _same
    if any(text.get(name) not in (None, 1, 1.0) for name in _CHANGED_LOGITS):
        raise LoadError(f"{config.model!r}: a score of two tokens is not supported for a model that scales its logits")
    rows = _head_rows(config, [token for token in tokens if token is not None])
    return (rows[1:] - rows[:1] if len(rows) == 2 else rows), [], torch.sigmoid


def _lowers(config: EngineConfig) -> bool:
    options = json_of(config, "sentence_bert_config.json")
    return isinstance(options, dict) and options.get("do_lower_case") is True


def _labels(values: Mapping[str, Any], count: int) -> list[str]:
    named = {int(key): str(value) for key, value in (values.get("id2label") or {}).items()}
    return [named.get(i, f"LABEL_{i}") for i in range(count)]


def _activation_of_pairs(values: Mapping[str, Any]) -> Callable[[Tensor], Tensor] | None:
    """As sentence-transformers' CrossEncoder reads it from config.json; None: it says nothing."""
    options = values.get("sentence_transformers")
    named = options.get("activation_fn") if isinstance(options, dict) else None
    named = named or values.get("sbert_ce_default_activation_function")
    if named is None:
        return None
    name = str(named).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise _Unsupported(f"the activation of its scores is {named}")
    return _ACTIVATIONS[name]


def _activation(values: Mapping[str, Any], num_labels: int) -> Callable[[Tensor], Tensor]:
    """As transformers' pipelines choose it."""
    kind = values.get("problem_type")
    if kind == "regression":
        return _same
    if kind == "multi_label_classification" or num_labels == 1:
        return torch.sigmoid
    return lambda logits: logits.softmax(dim=-1)


def _answer_tokens(config: EngineConfig, modules: _Modules) -> tuple[int | None, int] | None:
    """Ids of the tokens (no, yes) whose logits make a score."""
    named = config.hf_overrides.classifier_from_token
    if named is None:
        return modules.tokens
    from tokenizers import Tokenizer

    path = checkpoint_file(config.tokenizer_source, "tokenizer.json", config.tokenizer_source_revision)
    tokenizer = None if path is None else Tokenizer.from_file(str(path))
    ids = [None if tokenizer is None else tokenizer.token_to_id(token) for token in named]
    if ids[0] is None or ids[1] is None:
        raise LoadError(f"hf_overrides: classifier_from_token={list(named)}: not tokens of the checkpoint's tokenizer")
    return ids[0], ids[1]


def _head_rows(config: EngineConfig, token_ids: list[int]) -> Tensor:
    """float32 [len(token_ids), H]; of the head, or of the embedding that it is tied to."""
    files = tensors_of(config)
    for ending in ("lm_head.weight", "embed_tokens.weight", "wte.weight"):
        for name in files.dtypes:
            if name.endswith(ending):
                return files.rows(name, token_ids).float()
    raise LoadError(f"{config.model!r}: a score of two tokens needs lm_head.weight in safetensors files")


def _template_of(config: EngineConfig) -> list[str]:
    given = config.pooler_config.score_template
    if given is None and not config.hf_overrides.is_original_qwen3_reranker:
        named = config.hf_overrides.classifier_from_token is not None or (
            "1_LogitScore" in json.dumps(json_of(config, "modules.json"))
        )
        return list(_QWEN3_TEMPLATE) if named else []
    return list(_QWEN3_TEMPLATE) if given is None or given == "qwen3" else list(given)


def _matryoshka(
    values: Mapping[str, Any], text: Mapping[str, Any], is_any: bool | None, sizes: list[int] | None
) -> list[int] | None:
    """As vLLM decides it: by `matryoshka_dimensions` or `is_matryoshka` of config.json."""
    sizes = sizes or values.get("matryoshka_dimensions") or text.get("matryoshka_dimensions")
    if sizes:
        return sorted(int(size) for size in sizes)
    is_any = is_any if is_any is not None else values.get("is_matryoshka") or text.get("is_matryoshka")
    return [] if is_any else None


def _same(logits: Tensor) -> Tensor:
    return logits
