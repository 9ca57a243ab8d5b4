# SPDX-License-Identifier: Apache-2.0
"""The tree hash: sensitive to every bit, place, name and order; the same on any route."""

import hashlib

import pytest
import torch

from shoal.node.digest import digest_tensors, tensor_digest

DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.float16, torch.uint8]


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


def reference(words: list[int], start: int) -> int:
    """The definition, in plain integers."""
    mask = 2**64 - 1

    def finish(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    golden, state = 0x9E3779B97F4A7C15, start
    for base in range(0, len(words), 65_536):
        leaf = words[base : base + 65_536]
        total = sum(w * (finish((i + 1) * golden & mask) | 1) for i, w in enumerate(leaf))
        state = finish(((state ^ (total & mask)) + golden) & mask)
    return state


def test_digest_follows_its_definition_over_several_leaves() -> None:
    tensor = torch.randint(-(2**31), 2**31, (131_079,), generator=torch.Generator().manual_seed(3))
    tensor = tensor.to(torch.int32)
    start = int.from_bytes(hashlib.sha256(b"torch.int32[131079]").digest()[:8], "little")
    assert tensor_digest(tensor) == reference(tensor.tolist(), start)


def test_digest_is_pinned() -> None:
    """Two releases in one run must agree; a change here is a change of protocol."""
    assert tensor_digest(torch.arange(6, dtype=torch.float32).view(2, 3)) == 17486751254473782753


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (300, 701)])
def test_every_position_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = draw(shape, dtype)
    digest = tensor_digest(tensor)
    assert 0 <= digest < 2**64
    assert digest == tensor_digest(tensor.clone())
    for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
        changed = tensor.clone()
        changed.view(-1)[place] += 1
        assert tensor_digest(changed) != digest


def test_swapped_elements_and_signs_show() -> None:
    tensor = draw((100_000,), torch.float32).add_(1)
    tensor[1] += 1000
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    far = tensor.clone()
    far[[1, 70_000]] = tensor[[70_000, 1]]
    digests = {tensor_digest(t) for t in (tensor, swapped, far, -tensor)}
    assert len(digests) == 4


def test_shape_dtype_and_length_show() -> None:
    zeros = [
        torch.zeros(8),
        torch.zeros(9),
        torch.zeros(2, 4),
        torch.zeros(8, dtype=torch.int32),
        torch.zeros(0),
    ]
    assert len({tensor_digest(t) for t in zeros}) == len(zeros)


def test_negative_zero_differs_from_zero() -> None:
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_hash_like_their_copies(dtype: torch.dtype) -> None:
    matrix = draw((201, 303), dtype)
    for view in (matrix[1:, 3:], matrix.t(), matrix.view(-1)[1:], matrix.view(-1)[3:700]):
        assert tensor_digest(view) == tensor_digest(view.clone().contiguous())


def test_names_and_order_show() -> None:
    a, b = draw((5,), torch.float32, 1), draw((5,), torch.float32, 2)
    digests = {
        digest_tensors([("a", a), ("b", b)]),
        digest_tensors([("b", b), ("a", a)]),
        digest_tensors([("a", b), ("b", a)]),
        digest_tensors([("a", a)]),
    }
    assert len(digests) == 4
