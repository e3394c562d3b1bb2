"""The layers of an encoder as one native call equal torch's, on every instruction set, and on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from inflight.kernels.cpu.cpu_encoder import EncoderLayerTables, EncoderTables, encode
from inflight.kernels.cpu.cpu_linear import PackedWeight
from inflight.kernels.cpu.library import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

EPS = 1e-12
CHUNK = 168  # rows of a thread: `kChunkRows` of cpu_encoder.cpp
# Heads, their size, and features of the MLP: whole panels of 16 features, and parts of one.
SHAPES = {"heads of 8": (5, 8, 72), "of 24": (1, 24, 40), "of 64": (2, 64, 160)}


class Layers:
    """Random layers, in float32: their weights by name, and the tables of the kernel."""

    def __init__(self, heads: int, head_size: int, middle: int, num_layers: int = 2, seed: int = 0) -> None:
        size = heads * head_size
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        shapes = {"q": (size, size), "k": (size, size), "v": (size, size), "output": (size, size)}
        shapes |= {"up": (middle, size), "down": (size, middle)}
        self.heads, self.size, self.scaling = heads, size, 0.7 * head_size**-0.5
        self.weights = [
            {name: random(*shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
            | {f"{name}.bias": 0.3 * random(shape[0]) for name, shape in shapes.items()}
            | {f"norm{i}": 1 + 0.2 * random(size) for i in range(2)}
            | {f"norm{i}.bias": 0.2 * random(size) for i in range(2)}
            for _ in range(num_layers)
        ]

    def tables(self) -> EncoderTables:
        return EncoderTables([_tables(weights) for weights in self.weights], self.heads, self.scaling, EPS)

    def of_torch(self, lengths: list[int], hidden: Tensor) -> Tensor:
        """In float64, one request after another."""
        return torch.cat([self._alone(part.double()) for part in hidden.split(lengths) if len(part)])

    def _alone(self, x: Tensor) -> Tensor:
        for weights in self.weights:
            w = {name: weight.double() for name, weight in weights.items()}

            def project(name: str, x: Tensor, w: dict[str, Tensor] = w) -> Tensor:
                return linear(x, w[name], w[f"{name}.bias"])

            q, k, v = (project(name, x).view(len(x), self.heads, -1).transpose(0, 1)[None] for name in "qkv")
            attended = scaled_dot_product_attention(q, k, v, scale=self.scaling)[0]
            attended = attended.transpose(0, 1).reshape(len(x), self.size)
            x = layer_norm(x + project("output", attended), [self.size], w["norm0"], w["norm0.bias"], EPS)
            x = x + project("down", gelu(project("up", x)))
            x = layer_norm(x, [self.size], w["norm1"], w["norm1.bias"], EPS)
        return x


def _tables(weights: dict[str, Tensor]) -> EncoderLayerTables:
    def pack(*names: str) -> PackedWeight:
        return PackedWeight([weights[name] for name in names], [weights[f"{name}.bias"] for name in names])

    norms = [weights[name] for name in ("norm0", "norm0.bias", "norm1", "norm1.bias")]
    return EncoderLayerTables(pack("q", "k", "v"), pack("output"), pack("up"), pack("down"), norms)


def native(layers: Layers, lengths: list[int], hidden: Tensor, read: Tensor | None = None) -> Tensor:
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    result = hidden.clone()
    encode(layers.tables(), starts, result, read)
    return result


def embeddings(count: int, size: int, seed: int = 1) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def set_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layers_equal_torchs(isa: str, shape: tuple[int, int, int]) -> None:
    """Of prompts at the limits of a chunk of keys, of one token, and of none."""
    layers = Layers(*shape)
    lengths = [256, 0, 1, 257, 0, 0, 16, 513, 17, 0]
    hidden = embeddings(sum(lengths), layers.size)
    result = native(layers, lengths, hidden)
    torch.testing.assert_close(result.double(), layers.of_torch(lengths, hidden), rtol=2e-5, atol=2e-5)
    at = 0
    for length in lengths:
        alone = native(layers, [length], hidden[at : at + length])
        assert torch.equal(alone, result[at : at + length]), f"a prompt of {length} tokens has other bits alone"
        at += length


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_that_are_read_have_the_same_bits_if_the_last_layer_computes_no_others(
    isa: str, shape: tuple[int, int, int]
) -> None:
    """The first rows of prompts, the last ones, some in between, and more of them than a thread takes at once."""
    layers = Layers(*shape, num_layers=1 + shape[0] % 2)
    lengths = [257, 0, 1, 80, 0, 0, 16, 17, 0]
    hidden = embeddings(sum(lengths), layers.size)
    expected = native(layers, lengths, hidden)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1][torch.tensor(lengths) > 0]
    ends = torch.tensor(lengths).cumsum(0) - 1
    for read in (starts, ends[-2:], torch.arange(100, 100 + CHUNK + 2), torch.tensor([300])):
        result = native(layers, lengths, hidden, read.unique())
        assert torch.equal(result[read], expected[read])
    others = native(layers, lengths, hidden, starts)
    assert (others != expected).any(dim=1).sum() == len(hidden) - len(starts), "others are left out"


@pytest.mark.usefixtures("one_thread")
def test_a_token_that_is_no_number_changes_no_other_request(isa: str) -> None:
    layers, lengths = Layers(*SHAPES["of 24"]), [20, 33, 5]
    hidden = embeddings(sum(lengths), layers.size)
    spoiled = hidden.clone()
    spoiled[30, 7] = float("nan")
    result, expected = native(layers, lengths, spoiled), native(layers, lengths, hidden)
    assert result[20:53].isnan().all()
    for rows in (slice(20), slice(53, 58)):
        assert torch.equal(result[rows], expected[rows])


def exact_gelu(x: Tensor) -> Tensor:
    """In float64, far to the left, too, where torch's own loses all bits to 1 + erf(x)."""
    x = x.double()
    return x * torch.special.erfc(-x * 0.5**0.5) / 2


def layers_of_gelu(x: Tensor) -> tuple[Layers, Tensor]:
    """One layer that computes GELU of these numbers, for any hidden states; and by what its results are multiplied.

    The last norm needs numbers of about 1, and of both signs, so that a result keeps its relative error.
    """
    size = len(x)
    layers = Layers(size // 8, 8, size, num_layers=1)
    (weights,) = layers.weights
    for weight in weights.values():
        weight.zero_()
    exact = exact_gelu(x)
    factors = torch.where(exact.abs() > 1e-30, exact.abs().reciprocal(), 1.0).float()
    factors[::2] *= -1
    weights["up.bias"] += x
    weights["down"] += factors.diag()
    weights["norm1"] += 1
    return layers, factors


@pytest.mark.usefixtures("one_thread")
def test_gelu_keeps_its_relative_error_where_it_is_nearly_0(isa: str) -> None:
    """7e-6 far to the left, by the rounding of x^2 / 2 in exp(-x^2 / 2); torch's own has no bits left there."""
    x = torch.linspace(-20, 20, 328)
    layers, factors = layers_of_gelu(x)
    exact = exact_gelu(x) * factors.double()
    expected = layer_norm(exact, [len(x)], eps=EPS)
    (result,) = native(layers, [1], torch.ones(1, len(x)))
    assert (result.double() - expected).abs().max() < 1e-5


@pytest.mark.usefixtures("one_thread")
def test_gelu_of_what_is_no_number_is_none(isa: str) -> None:
    layers, _ = layers_of_gelu(torch.tensor([1.0, -1.0, float("nan"), 2.0] * 4))
    assert native(layers, [3], torch.ones(3, 16)).isnan().all()


@pytest.mark.usefixtures("set_threads")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("more", [-1, 1])
def test_any_number_of_threads_computes_the_same_bits(threads: int, more: int) -> None:
    """On either side of the number of rows from which threads take chunks of tokens, not panels of products."""
    layers = Layers(4, 16, 200, num_layers=4)
    rows = CHUNK * threads + more
    lengths = [rows - 40, 1, 0, 39]
    hidden = embeddings(rows, layers.size)
    torch.set_num_threads(1)
    expected = native(layers, lengths, hidden)
    torch.testing.assert_close(expected.double(), layers.of_torch(lengths, hidden), rtol=5e-5, atol=5e-5)
    torch.set_num_threads(threads)
    read = torch.tensor([0, rows - 40, rows - 39])
    for _ in range(8):
        assert torch.equal(native(layers, lengths, hidden), expected)
        assert torch.equal(native(layers, lengths, hidden, read)[read], expected[read])
