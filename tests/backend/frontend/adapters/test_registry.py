"""Names and numbers of adapters, in vllm_backend's and TensorRT-LLM's terms."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from inflight.engine.adapter import AdapterRef
from inflight.frontend.adapters.adapter_files import KeptAdapter
from inflight.frontend.adapters.registry import AdapterRegistry
from inflight.frontend.errors import RequestError


def adapter(name: str, digest: str = "0" * 32) -> KeptAdapter:
    content: Any = SimpleNamespace()
    return KeptAdapter(AdapterRef(name, digest, "/kept", 8), "/source", content)


@pytest.fixture
def registry() -> AdapterRegistry:
    made = AdapterRegistry(True, {"doll": "a", "sheep": "b"})
    for name in ("doll", "sheep"):
        made.put(adapter(name))
    return made


def refused(registry: AdapterRegistry, name: str | None, number: int | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        registry.chosen(name, number)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


def test_the_errors_are_vllm_backends(registry: AdapterRegistry) -> None:
    assert refused(AdapterRegistry(False), "doll") == "LoRA feature is not enabled."
    assert refused(AdapterRegistry(False), None, 1) == "LoRA feature is not enabled."
    assert refused(registry, "bactrian") == "LoRA bactrian is not supported, we currently support ['doll', 'sheep']"
    assert refused(registry, "") == "LoRA  is not supported, we currently support ['doll', 'sheep']"
    assert AdapterRegistry(False).chosen(None, None) is None
    assert registry.chosen(None, None) is None


def test_numbers_follow_the_file_from_1(registry: AdapterRegistry) -> None:
    for number, name in ((1, "doll"), (2, "sheep")):
        found = registry.chosen(None, number)
        assert found is not None and found.ref.name == name
        assert registry.chosen(name, number) is found
    for number in (0, 3, 2**64 - 1):
        said = refused(registry, None, number)
        assert said == (
            f"lora_task_id={number}: no adapter has this number; there are 1 (doll), 2 (sheep), in the order of "
            "multi_lora.json"
        )
    assert refused(registry, "doll", 2) == "lora_task_id=2 is 'sheep', and lora_name='doll': give one of them"


def test_a_number_is_never_another_adapters(registry: AdapterRegistry) -> None:
    assert registry.put(adapter("bactrian")) == 3
    registry.remove("bactrian")
    assert "no adapter has this number" in refused(registry, None, 3)
    assert registry.put(adapter("llama")) == 4
    assert registry.put(adapter("bactrian")) == 5
    registry.remove("doll")
    assert registry.put(adapter("doll", "1" * 32)) == 1, "a name of the file has its number for good"


def test_a_reload_replaces_the_content_and_keeps_the_number(registry: AdapterRegistry) -> None:
    before = registry.chosen("doll", None)
    assert registry.put(adapter("doll", "1" * 32)) == 1
    after = registry.chosen("doll", None)
    assert before is not None and after is not None and (before.ref.id, after.ref.id) == ("0" * 32, "1" * 32)
    assert registry.ids() == {"doll": "1" * 32, "sheep": "0" * 32}


def test_an_error_does_not_list_ten_thousand_names() -> None:
    registry = AdapterRegistry(True)
    for number in range(10_000):
        registry.put(adapter(f"adapter-{number}"))
    said = refused(registry, "x")
    assert len(said) < 3000 and said.endswith("'adapter-99'] and 9900 more")
    assert len(refused(registry, None, 0)) < 3000
    for number in range(10_000):
        registry.remove(f"adapter-{number}")
    assert refused(registry, "x") == "LoRA x is not supported, we currently support []"
    assert not registry._numbers and not registry._names and not registry._adapters


class Counted(dict[Any, Any]):
    """Counts the keys that are looked at one after another."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            Counted.looks += 1
            yield key

    def items(self) -> Any:
        return ((key, self[key]) for key in self)


def test_a_request_looks_at_few_of_ten_thousand_names() -> None:
    registry = AdapterRegistry(True)
    for number in range(1, 10_001):
        registry.put(adapter(f"adapter-{number}"))
    registry._adapters, registry._names = Counted(registry._adapters), Counted(registry._names)
    for name, number in (("adapter-10000", None), (None, 10_000), ("adapter-5", 5)):
        assert registry.chosen(name, number) is not None
    assert Counted.looks == 0
    for name, number in (("x", None), (None, 10_001), ("adapter-5", 6)):
        refused(registry, name, number)
    assert 0 < Counted.looks <= 200


def test_an_error_fits_the_trailers_of_grpc_however_long_the_names_are() -> None:
    registry = AdapterRegistry(True)
    for number in range(200):
        registry.put(adapter(f"{number}" + "名" * 300))
    for said in (refused(registry, "名" * 300), refused(registry, None, 0)):
        assert len(quote(said)) < 8192 and "more" in said
