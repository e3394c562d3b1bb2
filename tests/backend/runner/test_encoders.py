"""Encoders: vectors equal transformers', alone and in ragged batches; a prompt is computed in one step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from encoder_checkpoints import ENCODER_VOCAB, ENCODERS, alone, logits_alone, make_encoder
from offline import make_core, make_device_core
from pooled import pooled, vectors_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification

from inflight.attention.base import LayerSpec
from inflight.attention.whole_rows import WholeRowAttention
from inflight.config import ConfigError
from inflight.engine.attached import Attached
from inflight.engine.messages import AddRequest
from inflight.engine.pooling import Pooling
from inflight.engine.sampling_params import SamplingParams
from inflight.frontend.request.pooled_request import void_params
from inflight.kernels.cpu.cpu_encoder import EncoderTables, encode
from inflight.kv_events_config import KVEventsConfig
from inflight.loading.forward import native_encoder
from inflight.loading.load_errors import LoadError

KINDS = ["mean", "cls", "last"] * 2
LENGTHS = (5, 40, 1, 17, 60, 33)
NATIVE = ["bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"]  # see docs/pooling.md
CLASSIFIERS = sorted(set(ENCODERS) - {"eurobert"})


def prompts_of(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, ENCODER_VOCAB, length).tolist() for length in LENGTHS]


def pair(request_id: int, prompt: list[int], start: int, task: str = "score", activates: bool = False) -> AddRequest:
    attached = Attached(pooling=Pooling(task, "cls", activates), second_start=start)
    return AddRequest(request_id, prompt, void_params(), attached=attached)


def reference(path: str, kind: Any = AutoModel) -> Any:
    return kind.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_encoder("bert", tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_encoder("bert", tmp_path_factory.mktemp("cross"), labels=["match"])


@pytest.mark.parametrize("model_type", ENCODERS)
def test_vectors_equal_transformers(model_type: str, tmp_path: Path) -> None:
    """Of every kind, in steps of uneven prompts and alone: the same bits, but for a single token of ModernBERT."""
    heads = {"n_heads": 1} if model_type == "distilbert" else {"num_attention_heads": 1, "num_key_value_heads": 1}
    path = make_encoder(model_type, tmp_path, **heads)
    model = reference(path)
    core = make_core(path, max_num_batched_tokens=96)
    asked = [pooled(i, prompt, kind) for i, (prompt, kind) in enumerate(zip(prompts_of(), KINDS))]
    together, _ = vectors_of(core, asked)
    for message, prompt, kind in zip(asked, prompts_of(), KINDS):
        found = together[message.request_id]
        np.testing.assert_allclose(found, alone(model, prompt, kind), rtol=1e-5, atol=1e-6)
        by_itself, _ = vectors_of(core, [message])
        if model_type != "modernbert" or len(prompt) > 1:
            assert by_itself[message.request_id].tobytes() == found.tobytes()
    assert core.pool.num_used == 0


@pytest.mark.parametrize("model_type", NATIVE)
def test_native_layers_over_several_tiles_of_keys(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in which threads take chunks of tokens, and prompts longer than a chunk of the attention kernel."""
    calls: list[tuple[int, list[int] | None]] = []

    def spy(tables: EncoderTables, starts: Tensor, hidden: Tensor, read: Tensor | None) -> None:
        calls.append((len(hidden), None if read is None else read.tolist()))
        encode(tables, starts, hidden, read)

    monkeypatch.setattr(native_encoder, "encode", spy)
    path = make_encoder(model_type, tmp_path, max_position_embeddings=700, initializer_range=0.1)
    model, rng = reference(path), np.random.default_rng(1)
    prompts = [rng.integers(4, ENCODER_VOCAB, length).tolist() for length in (600, 257, 16, 1, 96)]
    core = make_core(path, max_num_batched_tokens=1024)
    firsts = [0, 600, 857, 873, 874]  # all that the last layer computes, if few are read
    for kind, read in (("mean", None), ("cls", firsts)):
        calls.clear()
        together, _ = vectors_of(core, [pooled(i, prompt, kind) for i, prompt in enumerate(prompts)])
        assert calls == [(970, read)]
        for i, prompt in enumerate(prompts):
            np.testing.assert_allclose(together[i], alone(model, prompt, kind), rtol=1e-5, atol=1e-6)
            by_itself, _ = vectors_of(core, [pooled(i, prompt, kind)])
            assert by_itself[i].tobytes() == together[i].tobytes()


@pytest.mark.parametrize(
    ("model_type", "changes", "dtype", "reason"),
    [
        ("mpnet", {}, "float32", "the native ones are not for 'mpnet'"),
        ("bert", {"hidden_act": "relu"}, "float32", "the activation is ReLU, not GELUActivation"),
        ("bert", {"hidden_act": "gelu_new"}, "float32", "the activation is NewGELUActivation"),
        ("roberta", {"num_attention_heads": 8}, "float32", "a head has 4 features, which is no multiple of 8"),
        ("bert", {}, "bfloat16", "the native ones compute in float32, and dtype is torch.bfloat16"),
    ],
    ids=repr,
)
def test_the_log_says_why_layers_are_transformers(
    model_type: str,
    changes: dict[str, Any],
    dtype: str,
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", native_encoder.__name__)
    make_core(make_encoder(model_type, tmp_path, **changes), dtype=dtype)
    (record,) = (record for record in caplog.records if record.name == native_encoder.__name__)
    assert f"runs on transformers' layers: {reason}" in record.getMessage()


@pytest.mark.parametrize("model_type", CLASSIFIERS)
def test_classes_equal_transformers(model_type: str, tmp_path: Path) -> None:
    path = make_encoder(model_type, tmp_path, labels=["a", "b", "c"])
    model = reference(path, AutoModelForSequenceClassification)
    core = make_core(path)
    facts = core.runner.info.pooler  # type: ignore[attr-defined]
    assert (facts.tasks, facts.labels, facts.generates) == (["classify"], ["a", "b", "c"], False)
    asked = [pooled(i, prompt, facts.kind, task="classify") for i, prompt in enumerate(prompts_of())]
    vectors, _ = vectors_of(core, asked)
    for i, prompt in enumerate(prompts_of()):
        expected = torch.tensor(logits_alone(model, prompt)).softmax(-1)
        np.testing.assert_allclose(vectors[i], expected, rtol=1e-5, atol=1e-6)


def test_classes_of_a_mean(tmp_path: Path) -> None:
    path = make_encoder("modernbert", tmp_path, labels=["a", "b"], classifier_pooling="mean")
    model = reference(path, AutoModelForSequenceClassification)
    vectors, _ = vectors_of(make_core(path), [pooled(0, prompts_of()[1], "mean", task="classify", activates=False)])
    np.testing.assert_allclose(vectors[0], logits_alone(model, prompts_of()[1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [make_core, make_device_core])
def test_each_text_of_a_pair_has_its_type(cross_encoder: str, make: Any) -> None:
    """Beside texts without a second one, and after another request in the same slot."""
    model = reference(cross_encoder, AutoModelForSequenceClassification)
    core = make(cross_encoder, max_num_batched_tokens=96, max_num_seqs=2)
    starts = (2, 25, 0, 9, 30, 0)
    vectors, _ = vectors_of(core, [pair(i, *both) for i, both in enumerate(zip(prompts_of(), starts))])
    for i, (prompt, start) in enumerate(zip(prompts_of(), starts)):
        np.testing.assert_allclose(vectors[i], logits_alone(model, prompt, start), rtol=1e-5, atol=1e-5)
    assert not np.allclose(logits_alone(model, prompts_of()[1], 25), logits_alone(model, prompts_of()[1]), atol=1e-3)


def test_a_prompt_is_computed_in_one_step_and_none_is_passed_over_for_long(bert: str) -> None:
    core = make_core(bert, max_num_batched_tokens=66, max_num_seqs=8)
    for i, length in enumerate((40, 66, 20, 6, 66)):
        assert core.add_request(pooled(i, [5] * length, "mean")) is None
    steps = []
    while core.has_work:
        steps.append([delta.request_id for delta in core.step().deltas])
    assert steps == [[0, 2, 3], [1], [4]], "40 + 20 + 6 tokens, then the long one that was first in line"


def test_no_prefix_is_cached(bert: str) -> None:
    """Its tokens look ahead: the same tokens before others have other hidden states."""
    core, model = make_core(bert), reference(bert)
    prompt = prompts_of()[4]
    vectors, _ = vectors_of(core, [pooled(0, prompt, "last")])
    vectors |= vectors_of(core, [pooled(1, [*prompt[:48], 7, 8], "last")])[0]
    np.testing.assert_allclose(vectors[1], alone(model, [*prompt[:48], 7, 8], "last"), rtol=1e-5, atol=1e-6)
    assert core.pool.num_prefix_queries == 0


def test_keys_and_values_end_with_their_layer() -> None:
    backend, spec = WholeRowAttention(), LayerSpec(2, 2, 8, 8, scaling=1.0)
    cache = backend.new_cache(1, 16, spec, torch.float32, torch.device("cpu"))
    part = torch.randn(3, 2, 8)
    batch = cast(Any, SimpleNamespace(query_start_loc_cpu=[0, 3]))
    backend.write(part, part, cache, batch)
    assert backend.attend(part, cache, batch, spec, None).shape == part.shape
    assert cache.key.numel() == cache.value.numel() == 0


@pytest.mark.parametrize(
    "options",
    [
        dict(scheduling_policy="priority"),
        dict(scheduling_policy="edf"),
        dict(tenants={"a": {}}),
        dict(admission="predicted_peak"),
        dict(itl_target_ms=20.0),
        dict(max_num_partial_prefills=2, long_prefill_token_threshold=8),
        dict(async_scheduling=True),
        dict(swap_space="1MiB"),
        dict(native_forward=False),
        dict(block_size=8),
        dict(check_on_load=False),
    ],
    ids=repr,
)
def test_options_change_no_vector(bert: str, options: dict[str, Any]) -> None:
    core, model = make_core(bert, max_num_batched_tokens=66, **options), reference(bert)
    vectors, _ = vectors_of(core, [pooled(i, prompt, "mean") for i, prompt in enumerate(prompts_of())])
    for i, prompt in enumerate(prompts_of()):
        np.testing.assert_allclose(vectors[i], alone(model, prompt), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", ["bert", "mpnet", "modernbert"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_check(model_type: str, dtype: str, tmp_path: Path) -> None:
    path = make_encoder(model_type, tmp_path)
    vectors, _ = vectors_of(make_core(path, dtype=dtype), [pooled(0, prompts_of()[1], "mean")])
    assert vectors[0] @ alone(reference(path), prompts_of()[1]) > 0.999


def test_an_aborted_one_leaves_nothing(bert: str) -> None:
    core = make_core(bert, max_num_batched_tokens=66, max_num_seqs=2)
    for i in range(4):
        assert core.add_request(pooled(i, [5] * 60, "mean")) is None
    core.abort(1)
    core.step()
    core.abort(3)
    ended = []
    while core.has_work:
        ended += [delta.request_id for delta in core.step().deltas]
    assert ended == [2] and core.pool.num_used == 0


def test_a_row_for_text_fails_alone(bert: str) -> None:
    """A frontend refuses it; one that did not would lose no other request."""
    core = make_core(bert)
    assert core.add_request(AddRequest(1, [5, 6], SamplingParams(max_tokens=2, temperature=0.0, seed=0))) is None
    assert core.add_request(pooled(2, [5, 6], "mean")) is None
    message = core.step()
    assert [failed.request_id for failed in message.failed] == [1]
    assert [delta.request_id for delta in message.deltas] == [2]


class TestLengths:
    def test_positions_before_the_first_are_no_room(self, tmp_path: Path) -> None:
        path = make_encoder("roberta", tmp_path)
        core = make_core(path)
        assert core.info.max_model_len == 64, "66 positions, and two of them are for padding"
        vectors, _ = vectors_of(core, [pooled(0, [5] * 64, "mean")])
        np.testing.assert_allclose(vectors[0], alone(reference(path), [5] * 64), rtol=1e-5, atol=1e-6)
        refused = core.add_request(pooled(1, [5] * 65, "mean"))
        assert refused is not None and "at most 64 fit max_model_len=64" in refused.message
        with pytest.raises(ConfigError, match=r"starts at position 2, so at most 64 tokens have one"):
            make_core(path, max_model_len=65)

    @pytest.mark.parametrize("model_type", ["roberta", "mpnet"])
    def test_padding_tokens_in_a_prompt_have_no_place(self, model_type: str, tmp_path: Path) -> None:
        """A text can spell them: transformers gives them the position of padding, and counts on behind them."""
        path = make_encoder(model_type, tmp_path)
        prompts = [[5, 6, 1, 7, 1, 1, 8], [1, 5, 6], [9, 9], [1]]
        vectors, _ = vectors_of(make_core(path), [pooled(i, prompt, "mean") for i, prompt in enumerate(prompts)])
        for i, prompt in enumerate(prompts):
            np.testing.assert_allclose(vectors[i], alone(reference(path), prompt), rtol=1e-5, atol=1e-6)

    def test_of_sentence_bert(self, tmp_path: Path) -> None:
        path = make_encoder("bert", tmp_path)
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40}))
        assert make_core(path).info.max_model_len == 40
        assert make_core(path, max_model_len=66).info.max_model_len == 66, "the positions that the model has"

    def test_a_step_must_hold_a_prompt(self, bert: str) -> None:
        with pytest.raises(
            ConfigError, match=r"max_num_batched_tokens=65 is less than max_model_len=66, and an encoder"
        ):
            make_core(bert, max_num_batched_tokens=65)
        assert make_core(bert, max_num_batched_tokens=65, max_model_len=65).info.max_model_len == 65


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(quantization="int8"), "weights cannot be quantized"),
        (dict(enable_lora=True), "adapters are for decoders"),
        (dict(kv_tiers=[{"type": "host", "size": "1MiB"}]), "whose KV is not kept"),
        (dict(kv_events_config=KVEventsConfig(enable_kv_cache_events=True)), "no prefix cache to tell of"),
        (dict(attention_backend="reference"), "attention_backend='reference' is for decoders"),
        (dict(speculative_config={"method": "ngram", "num_speculative_tokens": 2}), "nothing to draft"),
    ],
)
def test_options_for_decoders_are_refused(bert: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_core(bert, **options)


def test_kv_events_for_nobody_are_no_option_for_decoders(bert: str) -> None:
    make_core(bert, kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"))


class TestTheCheck:
    def test_a_head_that_reads_other_tokens_is_refused(self, tmp_path: Path) -> None:
        """EuroBERT's classifies each token, and takes the mean of the logits."""
        with pytest.raises(
            LoadError, match=r"'eurobert' is not supported: the hidden states or logits of a test batch"
        ):
            make_core(make_encoder("eurobert", tmp_path, labels=["a", "b"]))

    def test_native_layers_that_are_wrong_are_left_out(self, bert: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("inflight.loading.forward.native_encoder.encode", lambda *_: None)
        (prompt, *_), model = prompts_of(), reference(bert)
        found, _ = vectors_of(make_core(bert), [pooled(0, prompt, "mean")])
        np.testing.assert_allclose(found[0], alone(model, prompt, "mean"), rtol=1e-5, atol=1e-6)

    def test_attention_that_is_wrong_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("inflight.attention.whole_rows._window", lambda n, *_: torch.ones(n, n).tril().bool())
        with pytest.raises(LoadError, match="differ by"):
            make_core(make_encoder("modernbert", tmp_path))

    def test_weights_that_are_not_numbers_are_refused(self, tmp_path: Path, bert: str) -> None:
        tensors = load_file(f"{bert}/model.safetensors")
        tensors["encoder.layer.1.output.dense.weight"][0, 0] = float("nan")
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text(Path(bert, "config.json").read_text())
        with pytest.raises(LoadError, match="its weights contain NaN; check the files"):
            make_core(str(tmp_path))

    def test_missing_weights_are_named(self, tmp_path: Path) -> None:
        path = make_encoder("bert", tmp_path, labels=["a", "b"])
        file = tmp_path / "model.safetensors"
        tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("classifier")}
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(LoadError, match=r"weights are in none of its files, such as classifier.bias"):
            make_core(path)

    def test_heads_for_training_are_left_out(self, tmp_path: Path, bert: str) -> None:
        """As in google-bert/bert-base: a masked language model's head, and no pooler."""
        tensors = {f"bert.{name}": tensor for name, tensor in load_file(f"{bert}/model.safetensors").items()}
        tensors = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
        tensors |= {"cls.predictions.bias": torch.zeros(3), "bert.embeddings.position_ids": torch.arange(66)[None]}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        values = json.loads(Path(bert, "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
        (tmp_path / "config.json").write_text(json.dumps(values))
        vectors, _ = vectors_of(make_core(str(tmp_path)), [pooled(0, [5, 6, 7], "mean")])
        np.testing.assert_allclose(vectors[0], alone(reference(bert), [5, 6, 7]), rtol=1e-5, atol=1e-6)
