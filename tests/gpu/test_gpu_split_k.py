"""The split-K product on a GPU: right, the same bits every time, and replayable."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from card_sizes import sized

from inflight.kernels.gpu.gpu_split_k import MAX_ROWS, Workspace, split_k_linear, split_of

CUDA = torch.device("cuda")
SIZES = sized([(1024, 3072), (4096, 4096), (1000, 14336)], [(50, 1168)])  # outputs, inputs
PRODUCTS, REPLAYS = sized((20, 50), (3, 2))
SMS = 132  # of an H100, so that parts are the same on every card


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_are_right_and_rows_do_not_depend_on_the_batch(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(MAX_ROWS, inputs, device=CUDA).to(dtype)
    weight, bias = (torch.randn(*shape, device=CUDA).to(dtype) for shape in ((outputs, inputs), (outputs,)))
    split = split_of(outputs, inputs, SMS)
    assert split is not None
    workspace = Workspace([(split, outputs)], CUDA)
    workspace.sums.fill_(float("nan"))
    out = split_k_linear(x, weight, bias, split, workspace)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert (out.double() - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm()
    for rows in (1, 3, 8):
        for first in (0, MAX_ROWS - rows):
            part = split_k_linear(x[first : first + rows], weight, bias, split, workspace)
            assert torch.equal(part, out[first : first + rows])
    assert not workspace.arrived.any()


def test_replays_of_a_graph_have_the_same_bits() -> None:
    torch.manual_seed(0)
    outputs, inputs = SIZES[-1]
    x, weight = torch.randn(5, inputs, device=CUDA).bfloat16(), torch.randn(outputs, inputs, device=CUDA).bfloat16()
    split = split_of(outputs, inputs, SMS)
    assert split is not None
    workspace = Workspace([(split, outputs)], CUDA)
    expected, graph = split_k_linear(x, weight, None, split, workspace), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Products that share the workspace follow each other at once.
        outs = [split_k_linear(x, weight, None, split, workspace) for _ in range(PRODUCTS)]
    for _ in range(REPLAYS):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)
