"""Rules that change the logits of the rows that ask for it, before a token is chosen.

To add one, write its class in a new file here (`base.LogitsRule` says what it provides) and list
it below.  Nothing else in `sampling/` knows a rule by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight.grammars.base import Grammars
from inflight.sampling.rules.allowed_tokens import AllowedTokens
from inflight.sampling.rules.bad_words import BadWords
from inflight.sampling.rules.base import LogitsEdit, LogitsMask, LogitsRule, Put, RowBatch
from inflight.sampling.rules.device_bad_words import DeviceBadWords
from inflight.sampling.rules.device_penalties import DevicePenalties
from inflight.sampling.rules.grammar_mask import grammar_rule
from inflight.sampling.rules.logit_bias import LogitBias
from inflight.sampling.rules.min_tokens import MinTokens
from inflight.sampling.rules.penalties import Penalties

__all__ = ["DEVICE_RULES", "RULES", "LogitsEdit", "LogitsMask", "LogitsRule", "Put", "RowBatch", "rules_of"]

# In order of application, which is vLLM's.
RULES: tuple[type[LogitsRule], ...] = (
    AllowedTokens,
    LogitBias,
    MinTokens,
    BadWords,
    Penalties,
)
_ON_DEVICE: dict[type[LogitsRule], type[LogitsRule]] = {BadWords: DeviceBadWords, Penalties: DevicePenalties}
# The same where the slots' tokens are on the device, too (`RowBatch.history`): none of these reads them on the host.
DEVICE_RULES: tuple[type[LogitsRule], ...] = tuple(_ON_DEVICE.get(rule, rule) for rule in RULES)


def rules_of(grammars: Grammars | None, rules: Sequence[type[LogitsRule]] = RULES) -> Sequence[type[LogitsRule]]:
    """`rules`, and first of all the grammars of a checkpoint."""
    return rules if grammars is None else (grammar_rule(grammars), *rules)
