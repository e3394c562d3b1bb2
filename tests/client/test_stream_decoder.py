"""Responses decoded from their bytes equal those of the protobuf library."""

from __future__ import annotations

import random
import struct

import pytest
from tritonclient.grpc import service_pb2

from inflight_client.errors import InflightError, ServerError
from inflight_client.stream_decoder import StreamDecoder
from inflight_client.wire import grpc_columns


def response(text="a", ids=(1,), final=False, error="", request_id="one", **numbers):
    message = service_pb2.ModelStreamInferResponse(error_message=error)
    inner = message.infer_response
    inner.model_name, inner.model_version, inner.id = "m", "1", request_id
    inner.parameters["triton_final_response"].bool_param = final
    outputs = [("text_output", "BYTES", struct.pack("<I", len(text.encode())) + text.encode(), 1)]
    outputs += [("token_ids", "INT64", struct.pack(f"<{len(ids)}q", *ids), len(ids))]
    outputs += [(name, "UINT32", struct.pack("<I", value), 1) for name, value in numbers.items()]
    for name, datatype, raw, count in outputs:
        inner.outputs.add(name=name, datatype=datatype, shape=[count])
        inner.raw_output_contents.append(raw)
    return message


def reference(message):
    parameters = message.infer_response.parameters
    return grpc_columns(message), parameters["triton_final_response"].bool_param


def test_a_stream_of_any_responses_decodes_as_the_library_does():
    rng, decoder = random.Random(3), StreamDecoder()
    for number in range(600):
        ids = [rng.randrange(-(2**40), 2**40) for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 40]))]
        text = "".join(rng.choices("aé€😀\0\n2*\x12", k=rng.choice([0, 1, 5, 50, 127, 128, 300, 20000])))
        extra = {"num_output_tokens": rng.randrange(2**32)} if rng.random() < 0.2 else {}
        message = response(text, ids, final=rng.random() < 0.1, request_id=rng.choice(["one", "two" * 60]), **extra)
        columns, final = reference(message)
        assert decoder.columns(message.SerializeToString()) == columns, number
        assert decoder.final is final


def test_a_known_head_is_not_parsed_again(monkeypatch):
    decoder = StreamDecoder()
    decoder.columns(response("a").SerializeToString())
    monkeypatch.setattr(decoder, "_whole", lambda message: pytest.fail("parsed"))
    assert decoder.columns(response("b" * 300, [7]).SerializeToString())["text_output"] == ["b" * 300]


def test_what_one_stream_has_had_is_not_parsed_again_in_another(monkeypatch):
    for final in (False, True):
        StreamDecoder().columns(response("a", final=final).SerializeToString())
    monkeypatch.setattr(StreamDecoder, "_whole", lambda *_: pytest.fail("parsed"))
    decoder = StreamDecoder()
    for final in (False, False, True):
        found = decoder.columns(response("b", [7], final=final, request_id="another").SerializeToString())
        assert (found["text_output"], found["token_ids"], decoder.final) == (["b"], [7], final)


def test_descriptions_that_begin_with_another_are_told_apart(monkeypatch):
    """A response with one more output begins with the description of one without."""
    longer, shorter = response("a", num_output_tokens=5, request_id="same"), response("a", request_id="same")
    for message in (longer, shorter):  # the latest is tried first
        StreamDecoder().columns(message.SerializeToString())
    decoder = StreamDecoder()
    monkeypatch.setattr(StreamDecoder, "_whole", lambda *_: pytest.fail("parsed"))
    for _ in range(2):
        for message in (longer, shorter):
            assert decoder.columns(message.SerializeToString()) == reference(message)[0]
        monkeypatch.setattr(StreamDecoder, "_like_another", lambda *_: pytest.fail("not known"))


def test_an_id_that_is_no_text_is_refused_though_its_outputs_are_known():
    message = response("a", request_id="another").SerializeToString()
    StreamDecoder().columns(message)
    with pytest.raises(ServerError, match="no response"):
        StreamDecoder().columns(message.replace(b"another", b"an\xffther"))


def test_an_error_after_output_is_raised_and_ends_the_stream():
    decoder = StreamDecoder()
    decoder.columns(response().SerializeToString())
    with pytest.raises(InflightError, match="out of luck"):
        decoder.columns(service_pb2.ModelStreamInferResponse(error_message="out of luck").SerializeToString())
    assert decoder.final


def test_an_error_that_is_not_final_says_so():
    decoder = StreamDecoder()
    with pytest.raises(InflightError):
        decoder.columns(response(error="later").SerializeToString())
    assert not decoder.final


@pytest.mark.parametrize("known", [True, False])
def test_every_cut_and_every_changed_byte_is_refused_or_read_as_the_library_reads_it(known):
    whole = response("some text", [5], num_output_tokens=1).SerializeToString()
    broken = [whole[:end] for end in range(len(whole))]
    broken += [whole[:i] + bytes([whole[i] ^ flip]) + whole[i + 1 :] for i in range(len(whole)) for flip in (1, 8, 128)]
    for message in broken:
        decoder = StreamDecoder()
        if known:
            decoder.columns(whole)
        try:
            expected = reference(service_pb2.ModelStreamInferResponse.FromString(message))[0]
        except Exception:  # not a message, or no tensor of its type
            with pytest.raises((InflightError, ValueError, TypeError)):
                decoder.columns(message)
        else:
            assert decoder.columns(message) == expected


def test_bytes_that_are_no_response_are_named():
    with pytest.raises(ServerError, match="3 bytes that are no response"):
        StreamDecoder().columns(b"\xff\xff\xff")


def test_an_empty_final_response_has_no_outputs():
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.parameters["triton_final_response"].bool_param = True
    decoder = StreamDecoder()
    assert decoder.columns(message.SerializeToString()) == {} and decoder.final
