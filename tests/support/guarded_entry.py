"""A repository for a server with an admin key."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["CHECKPOINT", "HEADER", "KEY", "write_guarded"]

CHECKPOINT = Path(__file__).parents[2] / "model_repository" / "demo" / "1" / "checkpoint"
KEY = "a-key-of-the-tests-0123"
HEADER = "x-tenant-8f21"
BOMB = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
OPTIONS = {
    "dtype": "float32",
    "kv_cache_memory": "16MiB",
    "cpu_threads": 1,
    "spare_engine": False,
    "step_trace": 8,
    "tenant_header": HEADER,
    "chat_template": "{% if messages[0].role == 'bomb' %}" + BOMB + "{% endif %}{{ messages[0].content }}",
    "chat_template_timeout": 0.2,
}


def write_guarded(repository: Path) -> None:
    """An entry with the name `mine`, whose model takes the tenant from a header."""
    version = repository / "mine" / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps({"model": str(CHECKPOINT), **OPTIONS}))
    (version.parent / "config.pbtxt").write_text('backend: "inflight"\n')
