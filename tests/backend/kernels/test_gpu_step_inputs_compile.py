"""The kernels around a step compile for real GPUs, once for all batches.  Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

SCRIPT = """
import json, random, sys
import numpy as np
import torch
from gpu_target import target
from random_steps import RandomSteps
from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.base import mask_words
from inflight.kernels.gpu import gpu_bad_words, gpu_bitmask, gpu_penalties, gpu_step_inputs
from inflight.device.batch_state import BatchState
from inflight.runner.step_inputs import DeviceState, StepInputTensors, StepSize
from inflight.runner.step_rows import RowWriter, StepRows
from inflight.runner.step_upload import StepUpload, upload_bytes
from inflight.sampling import SamplingTable
from inflight.sampling.rules import DEVICE_RULES

arch, cpu, limits = int(sys.argv[1]), torch.device("cpu"), (33, 4096, 16)
state, tokens = BatchState(*limits, cpu), DeviceState.allocate(*limits, cpu)
inputs, rows = StepInputTensors.allocate(10**6, tokens), RowWriter(state, 33)
table = SamplingTable(33, 50257, cpu, DEVICE_RULES)
host, device = (torch.zeros(upload_bytes(33, 10**5), dtype=torch.uint8) for _ in range(2))
params = SamplingParams(repetition_penalty=1.1, bad_words_ids=[[5], [6, 7, 8]])
for slot in range(33):
    table.set_row(slot, params, slot, [], 1)
with target(arch) as compiled:
    for seed in range(8):
        steps = RandomSteps(random.Random(seed), *limits, 1000)
        for _ in range(2):
            out = steps.step()
            state.apply(out)
            rows.apply(out)
            numbers, upload = StepRows.of(out), StepUpload(host, device)
            size = numbers.size
            for size in (size, StepSize(33, size.tokens + 5, size.logits + 1, size.query_len, size.new_tokens + 3)):
                lines, device_lines, blocks = rows.write(out, numbers, size, upload)
                new_tokens = rows.write_tokens(out, size, lines, upload)
                gpu_step_inputs.make_inputs(size, device_lines, blocks, new_tokens, tokens, inputs)
            count = len(numbers.row_of_logits)
            if not count:
                continue
            sampled = torch.zeros(count, dtype=torch.int64)
            gpu_step_inputs.put_tokens(tokens.token_ids, inputs.sample_indices[:count], sampled)
            slots, positions = numbers.slot_of_logits, numbers.position_of_logits + 1
            metadata = table.select(slots, positions, put=upload.put, history=tokens.token_ids)
            matched, counted = metadata.edits
            matched.table.words, matched.table.tokens = matched.update.words, matched.update.tokens
            gpu_bad_words.ban(torch.empty(count, 50257), matched)
            counted.table.grow(33)
            gpu_penalties.count_and_penalise(torch.empty(count, 50257), counted)
            bitmask = torch.zeros(count, mask_words(50257), dtype=torch.int32)
            gpu_bitmask.apply(torch.empty(count, 50257), torch.arange(count), bitmask)
            steps.take(out, np.zeros(count, dtype=np.int64))
print(json.dumps([kernel.report(arch) for kernel in compiled]))
"""


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_one_variant_for_all_steps(tmp_path: Path, arch: int) -> None:
    """The first step, which is the one that memory is measured with, compiles everything."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(arch)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert sorted(kernel["kernel"] for kernel in kernels) == [
        "apply_bitmask_kernel",
        "ban_words_kernel",
        "count_kernel",
        "penalise_counted_kernel",
        "put_tokens_kernel",
        "step_inputs_kernel",
    ]
    for kernel in kernels:
        assert kernel["stack_bytes"] == 0, "nothing spills"
        assert kernel["registers"] <= 128
        assert kernel["shared_bytes"] <= 8192
