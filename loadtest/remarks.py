"""Sentences that a reader needs to judge the numbers of a report."""

from __future__ import annotations

from typing import Any

from loadtest.runner import Results
from loadtest.targets import Target

__all__ = ["remarks"]

_COUNTED = {
    "server": "the server says it with each response",
    "usage": "the server says it at the end of an answer; over an answer, its tokens are spread evenly",
    "chunks": "the server does not say it, so each response with text counts as one token",
}


def remarks(results: Results, models: dict[str, Any], cores: int) -> list[str]:
    """The sentences about all targets; `models` has the summary of each by its key."""
    found = []
    for target in results.targets:
        model = models[target.key]
        found += _load(target, model, cores)
        if model["lost"]:
            found.append(f"{target.name} lost {model['lost']} requests: {'; '.join(model['errors'])}.")
        if not results.plan.against_batcher:
            found += [_verdict(results, target, model), *_tokens(target, model)]
    if results.plan.load.prompt == "words" and not results.plan.against_batcher:
        found.append("Prompts are English words, about one token each: an endpoint takes only text.")
    return found


def _load(target: Target, model: dict[str, Any], cores: int) -> list[str]:
    if model["server_cores"] is None:
        return []
    text = f"{target.name} kept {model['server_cores'] / cores * 100:.0f}% of the {cores} cores busy"
    if model["client_cores"] is not None:
        text += f", the load generator beside it {model['client_cores'] / cores * 100:.0f}%"
    if model["gpu"] is not None:
        text += f"; the GPU was busy {model['gpu'] * 100:.0f}% of the time"
    return [text + "."]


def _verdict(results: Results, target: Target, model: dict[str, Any]) -> str:
    slo = results.plan.slo
    verb = "meets" if model["attainment"] >= slo.attainment else "misses"
    share, wanted = f"{model['attainment'] * 100:.0f}%", f"{slo.attainment * 100:.0f}%"
    return f"{target.name} {verb} the SLO: {share} of its requests are within it, and {wanted} must be."


def _tokens(target: Target, model: dict[str, Any]) -> list[str]:
    found = [f"Number of tokens of {target.name}: {_COUNTED[counted]}." for counted in model["counted"]]
    if "ignore_eos" in target.traits.get("without", ()):
        found.append(f"{target.name} has no ignore_eos: its model decides how long an answer is, up to the length.")
    if model["ended_early"]:
        answers = model["requests"] - model["lost"]
        found.append(f"{target.name} ended {model['ended_early']} of {answers} answers before the requested length.")
    return found
