"""Output tensors that repeat are made once."""

from __future__ import annotations

import numpy as np

from inflight.frontend.output.tensor_cache import TensorCache


def number(value: int, count: int = 1) -> np.ndarray:
    return np.array([value] * count, dtype=np.uint32)


def words(*values: bytes) -> np.ndarray:
    return np.array(values, dtype=np.object_)


class Made(list[tuple[str, list[object]]]):
    def __call__(self, name: str, array: np.ndarray) -> tuple[str, list[object]]:
        self.append((name, array.tolist()))
        return self[-1]


def test_equal_elements_of_an_output_share_a_tensor_and_others_do_not() -> None:
    made = Made()
    cache = TensorCache(made)
    for _ in range(3):
        assert cache.tensor("token_counts", number(1)) == ("token_counts", [1])
        assert cache.tensor("num_output_tokens", number(1)) == ("num_output_tokens", [1])
        assert cache.tensor("token_counts", number(2)) == ("token_counts", [2])
        assert cache.tensor("finish_reason", words(b"None")) == ("finish_reason", [b"None"])
        assert cache.tensor("finish_reason", words(b"stop")) == ("finish_reason", [b"stop"])
    assert len(made) == 5


def test_text_ids_and_several_elements_are_made_each_time() -> None:
    made = Made()
    cache = TensorCache(made)
    for name, array in (("text_output", words(b"a")), ("token_ids", number(1)), ("token_counts", number(1, 2))):
        assert cache.tensor(name, array) is not cache.tensor(name, array)
    assert len(made) == 6


def test_only_so_many_are_kept() -> None:
    made = Made()
    cache = TensorCache(made, limit=4)
    for value in range(100):
        assert cache.tensor("num_input_tokens", number(value)) == ("num_input_tokens", [value])
    assert len(cache._kept) <= 4 and len(made) == 100


def test_none_is_left_after_clear() -> None:
    made = Made()
    cache = TensorCache(made)
    cache.tensor("token_counts", number(1))
    cache.clear()
    cache.tensor("token_counts", number(1))
    assert len(made) == 2
