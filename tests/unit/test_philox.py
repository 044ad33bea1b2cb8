"""Known answers of Philox4x32-10 and the statistics of the dropout mask."""

import pytest
import torch

from flashdig.kernels.philox import keep_mask, philox4x32


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [  # the generator's published known-answer vectors
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, seed, words) -> None:
    tensors = tuple(torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox4x32(tensors, seed)) == words


def test_mask_does_not_depend_on_the_tile() -> None:
    index = torch.arange
    whole = keep_mask(7, 0.3, index(3), index(2), index(10), index(21))
    part = keep_mask(7, 0.3, index(1, 3), index(2), index(4, 9), index(6, 21))
    assert torch.equal(part, whole[1:, :, 4:9, 6:])


def test_share_kept_and_independence_of_heads_and_sequences() -> None:
    index = torch.arange
    keep = keep_mask(123, 0.25, index(2), index(2), index(160), index(64)).double()
    pairs = 160 * 64
    sigma = (0.25 * 0.75 / pairs) ** 0.5
    assert (keep.mean(dim=(2, 3)) - 0.75).abs().max() < 4 * sigma
    flat = keep.flatten(0, 1).flatten(1) - 0.75
    correlation = (flat @ flat.T) / (pairs * 0.25 * 0.75)
    assert (correlation - torch.diag(correlation.diagonal())).abs().max() < 4 / pairs**0.5


def test_edge_probabilities() -> None:
    index = torch.arange
    assert keep_mask(1, 0.0, index(1), index(1), index(8), index(8)).all()
    assert not keep_mask(1, 1.0, index(1), index(1), index(8), index(8)).any()
