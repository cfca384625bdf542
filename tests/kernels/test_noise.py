"""Philox bits, and the noise made of them: its distribution, and that an id's noise is its own."""

import numpy as np
import pytest
from evenflow.kernels.noise import BLOCK, LARGEST, Keys, block_minima, exponentials, gumbel
from evenflow.kernels.philox import philox4x32


def keys(*rows: tuple[int, int, int]) -> Keys:
    return Keys(*(np.array(column, np.uint64) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (np.array([part], np.uint64) for part in counter)
    words = philox4x32((c0, c1, c2, c3), np.array([key[1] << 32 | key[0]], np.uint64))
    assert tuple(words[:, 0].tolist()) == expected


def test_philox_of_shared_keys_equals_one_by_one() -> None:
    zero = np.zeros(1, np.uint64)
    first, key = np.arange(300, dtype=np.uint64), np.array([[7], [2**64 - 1]], np.uint64)
    many = philox4x32((first, zero + 5, key, zero), key)
    assert many.shape == (4, 2, 300)
    for row in (0, 1):
        for index in (0, 17, 299):
            one = philox4x32((first[index : index + 1], zero + 5, key[row], zero), key[row])
            assert np.array_equal(one[:, 0], many[:, row, index])


def test_noise_of_an_id_depends_on_its_row_and_itself() -> None:
    rows = keys((1, 5, 0), (1, 5, 1), (1, 6, 0), (2**64 - 1, 5, 0), (1, 5 + 2**32, 0))
    ids = np.arange(1000)
    together = gumbel(rows, ids)
    assert len({row.tobytes() for row in together[:4]}) == 4
    assert np.array_equal(together[4], together[0])
    for row in range(4):
        for some in (ids[::-1], ids[77:78], np.array([999, 3, 3, 64])):
            assert np.array_equal(gumbel(rows.take(np.array([row])), some)[0], together[row, some])


def test_noise_has_the_distribution_of_independent_gumbels() -> None:
    """64,000 values: whole, the blocks' largest, and the places that these have."""
    rows = Keys(*(np.arange(100, dtype=np.uint64) + shift for shift in (3, 50, 0)))
    noise = gumbel(rows, np.arange(10 * BLOCK))

    def distance(values: np.ndarray, shift: float = 0.0) -> float:
        """Kolmogorov's, from a Gumbel distribution moved by ``shift``, in standard units."""
        expected = np.exp(-np.exp(-(np.sort(values.ravel()) - shift)))
        ranks = np.arange(1, values.size + 1) / values.size
        return float(np.abs(expected - ranks).max() * np.sqrt(values.size))

    # 1.95 is exceeded once in a thousand seeds.
    assert distance(noise) < 1.95
    blocks = noise.reshape(1000, BLOCK)
    assert distance(blocks.max(axis=1), np.log(BLOCK)) < 1.95
    for place in (0, 31, 63):
        assert distance(blocks[:, place]) < 1.95
    places = np.bincount(blocks.argmax(axis=1), minlength=BLOCK)
    assert ((places - 1000 / 64) ** 2 / (1000 / 64)).sum() < 110  # chi-square with 63 degrees, 1 in 4,000
    # Neighbours in a block, in the same place of twin blocks, and in the next position, know nothing of each other.
    uniform = np.exp(-np.exp(-noise))
    for one, other in (
        (uniform[:, :-1], uniform[:, 1:]),
        (uniform[:, :-BLOCK], uniform[:, BLOCK:]),
        (uniform[:-1], uniform[1:]),
    ):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(one.size)


def test_no_noise_is_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenflow.kernels import noise as module

    row = keys((1, 1, 1))
    for word in (0, 0xFFFFFFFF):

        def words(counter: tuple[np.ndarray, ...], key: np.ndarray, word: int = word) -> np.ndarray:
            return np.full((4, *np.broadcast_shapes(counter[0].shape, key.shape)), word, np.uint32)

        monkeypatch.setattr(module, "philox4x32", words)
        least, _ = block_minima(row, 2)
        own = exponentials(row, np.array([3]))
        assert 0 < least.min() <= LARGEST / BLOCK and 0 < own[0] <= LARGEST
