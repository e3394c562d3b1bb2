"""Decodes the responses of one gRPC stream from their bytes.  No I/O.

Within a stream, responses mostly differ in nothing but the contents of their tensors: model, id, parameters, and the
names, types and shapes of the outputs are the same bytes again.  These are decoded once; what follows the id, once for
all streams of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

from inflight_client.errors import ServerError
from inflight_client.wire import Columns, decoder_of, grpc_columns

__all__ = ["StreamDecoder"]

# Tags in the serialised message, as (number of the field << 3 | wire type); both are length-delimited.
_INFER_RESPONSE, _RAW_CONTENTS = 0x12, 0x32
_NAMES = (0x0A, 0x12, 0x1A)  # model, version and id, in this order
_LENGTH_DELIMITED = 2
_MAX_HEADS = 4  # several occur where responses have different numbers of tokens
_MAX_DESCRIPTIONS = 8

Layout = tuple[tuple[str, Callable[[bytes], Any] | None], ...]  # name and decoder of each output
# Parameters and outputs as bytes, whether they are those of a final response, and the layout; the latest first.
Descriptions = tuple[tuple[bytes, bool, Layout], ...]

_described: Descriptions = ()  # threads replace it


class StreamDecoder:
    """Bytes of responses to columns.

    Attributes:
        final: whether the last response was the final one.
    """

    def __init__(self) -> None:
        self.final = False
        self._heads: list[tuple[bytes, Layout]] = []  # of responses that are not final, the latest first

    def columns(self, message: bytes) -> Columns:
        """The outputs of a response.

        Raises:
            InflightError: the response is an error, or no response.
        """
        found = self._known(message) or self._like_another(message)
        if found is None:
            return self._whole(message)
        return found

    def _known(self, message: bytes) -> Columns | None:
        """The outputs of a response whose head has come before; None for another one."""
        if self._heads:
            start = _infer_response_start(message)
            for head, layout in self._heads:
                if message.startswith(head, start):
                    found = _contents(message, start + len(head), layout)
                    if found is not None:  # else the head may be the beginning of another one
                        self.final = False
                        return found
        return None

    def _like_another(self, message: bytes) -> Columns | None:
        """The outputs of a response of a kind that another stream has had; None for another one."""
        start = _infer_response_start(message)
        place = _names_end(message, start) if start else 0
        for description, final, layout in _described if place else ():
            if message.startswith(description, place):
                end = place + len(description)
                found = _contents(message, end, layout)
                if found is not None:  # else as above
                    self.final = final
                    if not final:
                        self._heads = [(message[start:end], layout), *self._heads[: _MAX_HEADS - 1]]
                    return found
        return None

    def _whole(self, message: bytes) -> Columns:
        try:
            response = ModelStreamInferResponse.FromString(message)
        except DecodeError as error:
            raise ServerError(f"the server sent {len(message)} bytes that are no response: {error}") from None
        inner = response.infer_response
        # An error ends the request unless it states otherwise.
        final = inner.parameters.get("triton_final_response")
        self.final = bool(response.error_message) if final is None else final.bool_param
        columns = grpc_columns(response)
        if len(inner.outputs) == len(inner.raw_output_contents) > 0:
            self._learn(message, tuple((one.name, decoder_of(one.name, one.datatype)) for one in inner.outputs))
        return columns

    def _learn(self, message: bytes, layout: Layout) -> None:
        global _described
        start = _infer_response_start(message)
        place = _names_end(message, start) if start else 0
        end = _head_end(message, place) if place else 0
        if end:
            _described = ((message[place:end], self.final, layout), *_described[: _MAX_DESCRIPTIONS - 1])
            if not self.final:
                self._heads = [(message[start:end], layout), *self._heads[: _MAX_HEADS - 1]]


def _names_end(message: bytes, place: int) -> int:
    """The place after model, version and id, as far as they are there; 0 if they are not ASCII."""
    start = place
    for tag in _NAMES:
        if place < len(message) and message[place] == tag:
            length, place = _varint(message, place + 1)
            place += length
    return place if message[start:place].isascii() else 0


def _contents(message: bytes, place: int, layout: Layout) -> Columns | None:
    """The outputs from `place` to the end; None if there is something else."""
    columns, end = {}, len(message)
    for name, decode in layout:
        if place + 1 >= end or message[place] != _RAW_CONTENTS:
            return None
        length = message[place + 1]
        place += 2
        if length >= 0x80:
            length, place = _varint(message, place - 1)
        if decode is not None:  # no output of the contract has another type
            columns[name] = decode(message[place : place + length])
        place += length
    return columns if place == end else None


def _infer_response_start(message: bytes) -> int:
    """Where the only field of a response without an error begins; 0 if the message is something else."""
    if not message or message[0] != _INFER_RESPONSE:
        return 0
    length, start = _varint(message, 1)
    return start if start + length == len(message) else 0


def _head_end(message: bytes, place: int) -> int:
    """Where the contents of the tensors begin, which must be the last fields; 0 if they are not."""
    while place < len(message) and message[place] != _RAW_CONTENTS:
        tag, place = _varint(message, place)
        if tag & 7 != _LENGTH_DELIMITED:
            return 0
        length, place = _varint(message, place)
        place += length
    return place


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """A number of one to ten bytes, and the place after it; a message that ends in it yields the end."""
    number = shift = 0
    while place < len(message):
        byte = message[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return number, place
