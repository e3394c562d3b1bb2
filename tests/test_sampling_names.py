"""One table names the sampling parameters: the engine, the client, which works without the backend, and the gateway
have no other names and leave none out."""

from __future__ import annotations

from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.request.generation_config import _KEYS as CHECKPOINT_DEFAULTS
from inflight.frontend.request.sampling_keys import SAMPLING_KEYS
from inflight_client.request import SamplingOptions
from inflight_gateway.bodies import SamplingBody

CANONICAL = {name for name, key in SAMPLING_KEYS.items() if key.has_effect and key.alias_of is None}
# TensorRT-LLM's, and older names of vLLM's.
OTHER_CLIENTS = {
    "lora_task_id",
    "end_id",
    "guided_decoding_guide_type",
    "guided_decoding_guide",
    "guided_decoding",
    "flat_logprobs",
}
# The content of responses, which the client chooses itself.
RESPONSES = {"output_kind", "detokenize"}
# An option of a request in the client, and a model in the gateway.
ADAPTER = {"lora_name"}
# Options of the gateway's bodies that are no sampling parameters of the client.
REQUEST_LEVEL = {"model", "stream", "stream_options", "user", "prompt_cache_key", "priority"} | {
    *("best_of", "cache_salt", "kv_transfer_params", "request_id", "return_token_ids"),
}


def test_every_alias_has_a_canonical_key() -> None:
    assert {key.alias_of for key in SAMPLING_KEYS.values()} - {None} <= CANONICAL


def test_the_engine_takes_what_the_frontend_reads() -> None:
    frontend_only = {
        *OTHER_CLIENTS,
        *ADAPTER,
        "structured_outputs",
        "bad_words",
        "truncate_prompt_tokens",
        "output_kind",
    }
    assert set(SamplingParams.__struct_fields__) == CANONICAL - frontend_only | {"grammar", "bad_words_ids"}


def test_the_client_has_every_parameter() -> None:
    assert set(SamplingOptions.__annotations__) == CANONICAL - OTHER_CLIENTS - RESPONSES - ADAPTER


def test_the_gateway_passes_on_parameters_of_the_client() -> None:
    fields = set(SamplingBody.__struct_fields__)
    assert fields - REQUEST_LEVEL == set(SamplingOptions.__annotations__) - {"logprobs"}, "chats have a boolean"


def test_the_defaults_of_a_checkpoint_are_parameters() -> None:
    assert {key for key, *_ in CHECKPOINT_DEFAULTS.values()} <= CANONICAL
