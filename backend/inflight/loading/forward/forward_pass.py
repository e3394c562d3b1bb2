"""What a loaded model can yield for the rows of a step: logits, its head for some positions alone, hidden states.

Log probabilities of a prompt need logits at all of its positions: [2048, 151936] in float32 are 1.2 GB.  transformers'
models compute `head(decoder(tokens)[logits_to_keep])`, with a scale or a softcap behind the head in some.  So
`ModulePass` keeps the decoder's output of a step, and calls the model again, chunk by chunk, with a decoder that
returns it.  That output also is the hidden states that vectors are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, cat

__all__ = ["ForwardPass", "ModulePass", "NoHiddenStates"]

_MIN_ROWS = 256  # fewer would read the head's weights too often

_NOTHING = torch.empty(0, 0)


class NoHiddenStates(RuntimeError):
    """The model does not show the hidden states that its head takes."""


class ForwardPass(Protocol):
    """A loaded model, called in a forward context.

    Attributes:
        yields_hidden: whether it shows the hidden states that its head takes, as far as its structure tells.
        max_rows: most rows of the logits of `asked` in a chunk, where the head can run for some positions alone; a
            runner whose steps have more rows in any case raises it.
        head: from pooled hidden states, float32 [R, H], to the logits of scores or classes, float32 [R, labels]; None:
            the model has no such head of its own.
    """

    yields_hidden: bool
    max_rows: int
    head: Callable[[Tensor], Tensor] | None

    def run(
        self, input_ids: Tensor, position_ids: Tensor, keep: Tensor, asked: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Iterable[Tensor], Tensor]:
        """Run the model over int64 [1, T] tokens.

        Args:
            keep: int64 [N], tokens among the T.
            asked: int64 [P], likewise.
            hidden: int64 [Q], likewise.

        Returns:
            Logits [N, V] of `keep`, and those of `asked` in chunks of at most `max_rows`, each computed when it is
            taken.  A model whose head cannot run alone, such as the native decoder, computes them all at once.  And the
            hidden states [Q, H] of `hidden`, after the final norm.

        Raises:
            NoHiddenStates: the model has none for `hidden`.
        """


class ModulePass:
    """Implements `ForwardPass` for a model of transformers.

    Args:
        model: `model(input_ids[1, T], position_ids[1, T], logits_to_keep[K])`.
    """

    max_rows = _MIN_ROWS
    head: Callable[[Tensor], Tensor] | None = None

    def __init__(self, model: Any) -> None:
        self._model = model
        self._decoder = _decoder_of(model)
        self.yields_hidden = self._decoder is not None

    def run(
        self, input_ids: Tensor, position_ids: Tensor, keep: Tensor, asked: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Iterable[Tensor], Tensor]:
        inputs = dict(input_ids=input_ids, position_ids=position_ids)
        if not len(asked) and not len(hidden):
            return self._logits(inputs, keep), (), _NOTHING
        if self._decoder is not None:
            outputs: list[Any] = []
            hook = self._decoder.register_forward_hook(lambda module, args, output: outputs.append(output))
            try:
                logits = self._logits(inputs, keep)
            finally:
                hook.remove()
            if outputs:
                return logits, self._chunks(self._decoder, outputs[0], inputs, asked), outputs[0][0][0][hidden]
            self._decoder = None  # this model calls something else; computing the step again changes nothing
        if len(hidden):
            raise NoHiddenStates(f"{type(self._model).__name__} does not show the hidden states that its head takes")
        logits = self._logits(inputs, cat([keep, asked]))
        return logits[: len(keep)], logits[len(keep) :].split(self.max_rows), _NOTHING

    def _chunks(self, decoder: Any, output: Any, inputs: dict[str, Tensor], asked: Tensor) -> Iterator[Tensor]:
        """Logits of `asked`, from the decoder's output."""
        replaced = vars(decoder).get("forward")  # such as the fused decoder's
        for part in asked.split(self.max_rows):
            decoder.forward = lambda *_, **__: output
            try:
                logits = self._logits(inputs, part)
            finally:
                del decoder.forward
                if replaced is not None:
                    decoder.forward = replaced
            yield logits

    def _logits(self, inputs: dict[str, Tensor], keep: Tensor) -> Tensor:
        return self._model(**inputs, use_cache=False, logits_to_keep=keep).logits[0]


def _decoder_of(model: Any) -> Any:
    """The module whose output the head takes; None if none is found.

    It embeds the tokens: what a model names as its decoder can also be the model itself, or its head.
    """
    if not hasattr(model, "get_decoder"):
        return None
    embedding = model.get_input_embeddings()
    for found in (model.get_decoder(), getattr(model, "model", None)):
        if found is not None and found is not model and any(part is embedding for part in found.modules()):
            return found
    return None
