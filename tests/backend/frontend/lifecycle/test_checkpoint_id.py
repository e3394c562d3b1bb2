from __future__ import annotations

from pathlib import Path

from inflight.frontend.lifecycle.checkpoint_id import checkpoint_id


def test_the_id_is_that_of_the_content(tmp_path: Path) -> None:
    def write(name: str, weights: bytes, config: str = "{}", shard: str = "model.safetensors") -> str | None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(config)
        (folder / shard).write_bytes(weights)
        (folder / "README.md").write_text(name)
        return checkpoint_id(str(folder))

    weights = bytes(range(256)) * 400
    first = write("a", weights)
    assert first is not None and len(first) == 16 and int(first, 16) >= 0
    assert write("b", weights) == first
    changed = [
        write("c", weights[:-1] + b"\0"),
        write("d", b"\1" + weights[1:]),
        write("e", weights + b"\0"),
        write("f", weights, config='{"a": 1}'),
        write("g", weights, shard="model-00001-of-00001.safetensors"),
        write("h", b""),
    ]
    assert len({first, *changed}) == len(changed) + 1
    assert checkpoint_id(str(tmp_path / "none")) is None
