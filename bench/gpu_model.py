"""Models with random weights on the device, engines and runners on them, and the least work of a step."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from cpu_floor import ModelShape
from gpu_rows import Run
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PreTrainedModel, Qwen3Config

from inflight.config import ConfigError, EngineConfig
from inflight.engine.assembly import make_core
from inflight.engine.core import EngineCore
from inflight.loading.load_errors import LoadError
from inflight.runner.pipeline import make_runner, placed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["Work", "engine", "gpt_oss", "graphs_captured", "llama_8b", "qwen3_06b", "random_model", "refused", "words"]

_IDS = dict(bos_token_id=0, eos_token_id=2, pad_token_id=0)
_TOY = dict(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=8192, **_IDS)  # fmt: skip


def llama_8b(run: Run) -> PreTrainedConfig:
    """Llama 3 8B, or a toy."""
    real = dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
                tie_word_embeddings=False, **_IDS)  # fmt: skip
    return LlamaConfig(**(_TOY if run.tiny else real))


def qwen3_06b(run: Run) -> PreTrainedConfig:
    """Qwen3 0.6B, or a toy."""
    real = dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
                tie_word_embeddings=True, **_IDS)  # fmt: skip
    return Qwen3Config(**(_TOY if run.tiny else real))


def gpt_oss(run: Run) -> PreTrainedConfig:
    """gpt-oss 20B with 4 of its 24 layers, its experts in 16 bits, or a toy."""
    if run.tiny:
        small = _TOY | dict(intermediate_size=32)
        return GptOssConfig(**small, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    return GptOssConfig(num_hidden_layers=4, num_local_experts=32, **_IDS)


def words(config: PreTrainedConfig) -> str:
    """ "8.0B": the number of parameters."""
    size = Work(config, 2).weights + (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)
    return f"{size / 1e9:.1f}B" if size > 1e8 else f"{size / 1e3:.0f}K"


@dataclass(frozen=True)
class Work:
    """The least work of the steps of a decoder of the llama family.

    Attributes:
        itemsize: bytes of a weight and of a number of KV.
        layer_itemsize: bytes of a weight of the decoder layers, if they are fewer.
    """

    config: PreTrainedConfig
    itemsize: int
    layer_itemsize: float | None = None

    @property
    def _shape(self) -> ModelShape:
        return ModelShape.of(self.config)

    @property
    def weights(self) -> int:
        """Weights that every token is multiplied with: linear layers and output head."""
        return self._shape.layer_parameters + self._shape.head_parameters

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV per token."""
        return self._shape.kv_elements(1) * self.itemsize

    def decode_bytes(self, rows: int, context: int) -> int:
        """Bytes that a decode step reads: each weight once, and the KV of every row."""
        of_layer = self.itemsize if self.layer_itemsize is None else self.layer_itemsize
        weights = int(self._shape.layer_parameters * of_layer) + self._shape.head_parameters * self.itemsize
        return weights + rows * context * self.kv_bytes

    def decode_flops(self, rows: int, context: int) -> int:
        return 2 * rows * self.weights + self._shape.attention_flops(rows * context)

    def prefill_flops(self, tokens: int) -> int:
        """FLOPs of a prompt in one step, causal, with the logits of the last token only."""
        shape = self._shape
        products = 2 * tokens * shape.layer_parameters + 2 * shape.head_parameters
        return products + shape.attention_flops(tokens * (tokens + 1) // 2)


@torch.no_grad()
def random_model(config: Any, dtype: torch.dtype, attention: str, device: torch.device) -> PreTrainedModel:
    """A model whose weights are made on the device: linear layers N(0, 1 / inputs), embeddings N(0, 0.02^2)."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)  # norms
        else:
            parameter.normal_(0, 0.02 if "embed" in name else parameter.shape[1] ** -0.5)
    return model.eval().requires_grad_(False)


@contextmanager
def engine(run: Run, config: PreTrainedConfig, **options: Any) -> Iterator[EngineCore]:
    """An engine on random weights; its memory is free afterwards.

    Args:
        options: of model.json, beside model, device and dtype.

    Raises:
        ConfigError, LoadError: the engine does not take these options here.
    """
    device = torch.device(run.device)
    _free(device)  # what a failed engine before this one held until its exception was handled
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        values = dict(model=folder, device=run.device, dtype="float32" if run.tiny else "bfloat16",
                      load_format="dummy", enable_prefix_caching=False, check_on_load=False, **options)  # fmt: skip
        engine_config = placed(EngineConfig.from_dict(values))
        core = make_core(engine_config, make_runner(engine_config))
    try:
        yield core
    finally:
        del core.runner, core
        _free(device)


def _free(device: torch.device) -> None:
    """Give memory that nothing refers to back to the card."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def refused(error: Exception, name: str, shape: str) -> dict[str, Any]:
    """The row of what raised `error`, with the status "refused" (at load, by name) or "failed"."""
    status = "refused" if isinstance(error, (ConfigError, LoadError)) else "failed"
    reason = (str(error).splitlines() or [""])[0]
    return dict(name=name, shape=shape, status=status, why=f"{type(error).__name__}: {reason}")


def graphs_captured(core: EngineCore) -> bool:
    """Whether the engine replays its decode steps as CUDA graphs: not on a CPU, nor if they cannot be captured."""
    graphs = getattr(core.runner, "graphs", None)
    return bool(graphs)
