"""How sequences are cut into chunks and micro-batches."""

import numpy as np
import pytest

from ds4jax.readings import Job, micro_batches

CHUNK, SHAPES = 8, (2, 4, 8)


def jobs(*lengths):
    return [Job(np.arange(length, dtype=np.int32), f"j{n}", n) for n, length in enumerate(lengths)]


def cut(lengths, most_tokens, paused=()):
    found = micro_batches(jobs(*lengths), paused, CHUNK, most_tokens, SHAPES)
    return [[(piece.job.index, piece.first, piece.length) for piece in batch] for batch in found]


@pytest.mark.parametrize(
    ("lengths", "most_tokens", "expected"),
    [
        ((3,), 8, [[(0, 0, 3)]]),
        ((17,), 8, [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 1)]]),
        ((17,), 16, [[(0, 0, 8), (0, 8, 8)], [(0, 16, 1)]]),
        ((17,), 23, [[(0, 0, 8), (0, 8, 8)], [(0, 16, 1)]]),  # whole chunks
        ((9, 1, 8), 24, [[(0, 0, 8), (0, 8, 1), (1, 0, 1)], [(2, 0, 8)]]),  # over sequences
        ((17,), 1, [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 1)]]),  # never less than a chunk
    ],
)
def test_chunks_come_in_order_as_many_as_a_micro_batch_holds(lengths, most_tokens, expected):
    assert cut(lengths, most_tokens) == expected


def test_a_stopped_pass_is_the_first_micro_batch_whatever_its_size():
    found = cut((30, 5), 16, paused=(8, 3))
    assert found == [
        [(0, 0, 8), (0, 8, 3)],
        [(0, 11, 8), (0, 19, 8)],
        [(0, 27, 3), (1, 0, 5)],
    ]


def test_a_chunk_knows_its_rows_ids_and_what_follows():
    (batch,) = micro_batches(jobs(11), (), CHUNK, 100, SHAPES)
    first, last = batch
    assert (first.rows, last.rows) == (8, 4)
    assert not first.ends
    assert last.ends
    assert last.ids.tolist() == [8, 9, 10]
    assert first.following.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert last.following.tolist() == [9, 10, -1, -1]
