"""A field of a request has one home: the modules that pass a request on name only what they use."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest
from frontend_rig import RecordingClient, RecordingStats, demo_tokenizer
from source_tree import source_tree

from inflight.config import EngineConfig
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.engine_client import send_buffer, supervisor
from inflight.frontend.engine_client.supervisor import Supervisor
from inflight.frontend.output import output_processor
from inflight.frontend.output.output_processor import OutputProcessor
from inflight.frontend.request.parsed_request import ParsedRequest


class Extended(AddRequest, array_like=True, tag=1, frozen=True):
    """A request message with a field that only the engine knows."""

    adapter: str = ""


def test_a_new_field_of_the_message_reaches_the_engine_by_itself() -> None:
    engine = Supervisor(EngineConfig(model="m"), lambda level, line: None)
    opened = OutputProcessor(demo_tokenizer(), engine, RecordingStats(), print)
    message = Extended(0, [5, 6], SamplingParams(n=2), tenant="t", adapter="poems")
    for _ in range(2):
        opened.open(ParsedRequest(message), RecordingClient())
    frames = [msgspec.msgpack.decode(frame, type=Extended) for frame, _ in engine._send_buffer._new.values()]
    assert frames == [msgspec.structs.replace(message, request_id=number) for number in (1, 2)]


@pytest.mark.parametrize(
    ("module", "needed"),
    [(supervisor, {"params"}), (send_buffer, {"request_id", "params"}), (output_processor, {"request_id", "params"})],
)
def test_modules_that_pass_a_request_on_name_only_the_fields_they_need(module: object, needed: set[str]) -> None:
    tree = source_tree(Path(module.__file__))  # type: ignore[attr-defined]
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    assert (attributes | keywords) & set(AddRequest.__struct_fields__) == needed
