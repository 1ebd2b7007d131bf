"""Packing: every byte once, no document crossed, and an iterator that resumes exactly."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm.config import Config, UserError
from lm.data import NO_TARGET, PADDING_SEGMENT, Corpus, batches, packed_rows, read_corpus

documents = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=30)


def expected_pieces(texts: list[bytes], seq_len: int) -> collections.Counter:
    """(bytes, byte that follows or None) of every piece."""
    pieces = collections.Counter()
    for text in texts:
        for begin in range(0, len(text), seq_len):
            end = begin + seq_len
            pieces[text[begin:end], text[end] if end < len(text) else None] += 1
    return pieces


@settings(max_examples=60, deadline=None)
@given(texts=documents, seq_len=st.integers(2, 16), seed=st.integers(0, 2**32 - 1))
def test_an_epoch_holds_every_piece_of_every_document_once(texts, seq_len, seed):
    found = collections.Counter()
    for row in packed_rows(texts, seq_len, seed, epochs=1):
        segments = row["segment_ids"]
        assert row["tokens"].shape == segments.shape == (seq_len,)
        padding = segments == PADDING_SEGMENT
        assert np.all(segments[~padding] > 0)
        assert np.all(row["weights"] == (row["targets"] != NO_TARGET))
        assert not row["weights"][padding].any()
        for segment in np.unique(segments[~padding]):
            (places,) = np.nonzero(segments == segment)
            assert np.all(np.diff(places) == 1), "a segment is contiguous"
            tokens, targets = row["tokens"][places], row["targets"][places]
            assert np.array_equal(targets[:-1], tokens[1:])
            found[bytes(tokens.tolist()), None if targets[-1] == NO_TARGET else targets[-1]] += 1
    assert found == expected_pieces(texts, seq_len)


def test_short_documents_share_rows():
    rows = list(packed_rows([b"abc"] * 100, seq_len=9, seed=0, epochs=1))
    assert max(row["segment_ids"].max() for row in rows) == 3
    assert len(rows) <= 40  # 34 when nothing is wasted


@pytest.mark.parametrize("consumed", [0, 1, 7, 30])
def test_a_restored_iterator_continues_with_the_same_batches(consumed):
    texts = [bytes([i]) * (3 * i + 1) for i in range(40)]
    config, corpus = Config(seq_len=16, batch_size=3), Corpus(texts, "here")
    data = batches(corpus, config)
    for _ in range(consumed):
        next(data)
    state = data.get_state()
    rest = list(itertools.islice(data, 70))  # over more than an epoch
    again = batches(corpus, config)
    again.set_state(state)
    for want, got in zip(rest, itertools.islice(again, 70), strict=True):
        assert all(np.array_equal(want[name], got[name]) for name in want)


def test_the_seed_decides_the_order():
    corpus = Corpus([bytes(range(256))], "here")
    first = {seed: next(batches(corpus, Config(seq_len=8, batch_size=4, seed=seed))) for seed in (0, 1)}
    assert not np.array_equal(first[0]["tokens"], first[1]["tokens"])


def test_reading_a_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    files = {"b/2.txt": b"two", "a.md": b"one \xff", ".hidden/x": b"no", "c.bin": b"n\0o", "d.txt": b""}
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    assert read_corpus(str(tmp_path)).documents == [b"one \xff", b"two"]
    cut = read_corpus(str(tmp_path), max_bytes=6)
    assert cut.documents == [b"one \xff", b"t"]
    assert cut.cut_at == 6


def test_the_digest_sees_text_order_and_borders():
    digests = {Corpus(texts, "").digest() for texts in ([b"ab", b"c"], [b"a", b"bc"], [b"c", b"ab"], [b"abc"])}
    assert len(digests) == 4


def test_the_standard_library_is_the_default():
    corpus = read_corpus(None, max_bytes=100_000)
    assert corpus.size == 100_000
    assert all(b"\0" not in text for text in corpus.documents)


def test_no_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="no text found"):
        read_corpus(str(tmp_path))
