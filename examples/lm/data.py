"""Text in, packed rows out.

Documents are cut into pieces of at most one row. Grain shuffles the pieces and packs the short ones together,
first fit, so a row is one long piece or several short ones, each with its own segment id. A piece knows the
byte that follows it in its document, so every byte but a document's first is predicted exactly once per
epoch, cut or not.

T: bytes per row. B: rows per batch.
"""

import bisect
import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import grain
import numpy as np

from .config import Config, UserError

# A row position without a next byte: padding, or the end of a document.
NO_TARGET = -1
# fast_layers: a negative segment sees nothing and is seen by nothing.
PADDING_SEGMENT = -1
# Rows that are packed side by side. More waste less padding on short documents; the value is part of the data
# order.
_OPEN_ROWS = 256
# Folders of the standard library that are not prose-like source: tests dominate it, site-packages is not part
# of it.
_STDLIB_SKIPPED = frozenset({"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


@dataclasses.dataclass(frozen=True)
class Corpus:
    documents: list[bytes]
    source: str  # for people: where the text came from
    cut_at: int | None = None  # the byte limit, if it left something out

    @property
    def size(self) -> int:
        return sum(map(len, self.documents))

    def digest(self) -> str:
        """Changes with any document's text, length or order."""
        sha = hashlib.sha256()
        for document in self.documents:
            sha.update(len(document).to_bytes(8, "little"))
            sha.update(document)
        return sha.hexdigest()


def read_corpus(path: str | None, max_bytes: int = 0) -> Corpus:
    """Reads one file, every text file below a folder, or (None) the standard library's sources, in sorted
    order.

    Files are bytes: no encoding is assumed. In folders, hidden entries, empty files and files with a NUL byte
    (binary) are left out. Raises UserError for a missing path or when no text is found.
    """
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    if not root.exists():
        raise UserError(f"--data {path}: no such file or folder; give a text file or a folder of text files")
    if root.is_dir():
        skipped = _STDLIB_SKIPPED if path is None else frozenset()
        files = _walk(root, skipped, suffix=".py" if path is None else "")
    else:
        files = iter([root])
    documents, left = [], max_bytes or float("inf")
    for file in files:
        try:
            text = file.read_bytes()
        except OSError as error:
            raise UserError(f"--data: cannot read {file}: {error.strerror}") from error
        if root.is_dir() and b"\0" in text:
            continue
        if len(text) > left:
            documents.append(text[: int(left)])
            return Corpus([d for d in documents if d], str(root), cut_at=max_bytes)
        documents.append(text)
        left -= len(text)
    corpus = Corpus([d for d in documents if d], str(root))
    if max(map(len, corpus.documents), default=0) < 2:
        raise UserError(f"--data {root}: no text found; it needs a non-empty text file with 2 bytes or more")
    return corpus


def _walk(root: Path, skipped: frozenset[str], suffix: str) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in skipped)
        for name in sorted(names):
            file = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and file.is_file():
                yield file


class _Pieces:
    """Random access to the pieces of all documents: {tokens, targets}, each int32 [at most T]."""

    def __init__(self, documents: list[bytes], seq_len: int):
        self._documents = documents
        self._seq_len = seq_len
        counts = [-(-len(document) // seq_len) for document in documents]
        self._first_piece = np.cumsum([0, *counts]).tolist()

    def __len__(self) -> int:
        return self._first_piece[-1]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        document = bisect.bisect_right(self._first_piece, index) - 1
        start = (index - self._first_piece[document]) * self._seq_len
        # One byte more than the piece: the target of its last byte.
        text = np.frombuffer(self._documents[document][start : start + self._seq_len + 1], np.uint8)
        tokens = text[: self._seq_len].astype(np.int32)
        targets = np.full_like(tokens, NO_TARGET)
        targets[: len(text) - 1] = text[1:]
        return {"tokens": tokens, "targets": targets}


def packed_rows(
    documents: list[bytes], seq_len: int, seed: int, epochs: int | None = None
) -> grain.IterDataset[dict[str, np.ndarray]]:
    """Rows of {tokens, targets, segment_ids: int32 [T], weights: float32 [T]}, forever or for some epochs.

    segment_ids are unique within a row, PADDING_SEGMENT on padding. weights are 0 where there is nothing to
    predict: on padding and on the last byte of a document.
    """
    pieces = grain.MapDataset.source(_Pieces(documents, seq_len)).shuffle(seed=seed).repeat(epochs)
    # Everything is in memory already, so reader threads would only contend with the computation.
    stream = pieces.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    packed = grain.experimental.FirstFitPackIterDataset(
        stream,
        length_struct={"tokens": seq_len, "targets": seq_len},
        meta_features=("targets",),  # packed like the tokens, without segment ids of their own
        padding_struct={"tokens": 0, "targets": NO_TARGET},
        num_packing_bins=_OPEN_ROWS,
        shuffle_bins=False,
    )
    return packed.map(_finish_row)


def _finish_row(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    segments = row["tokens_segment_ids"]  # Grain numbers segments from 1 and marks padding by 0
    return {
        "tokens": row["tokens"],
        "targets": row["targets"],
        "segment_ids": np.where(segments == 0, PADDING_SEGMENT, segments),
        "weights": (row["targets"] != NO_TARGET).astype(np.float32),
    }


def batches(corpus: Corpus, config: Config) -> grain.DatasetIterator:
    """An endless iterator of batches [B, T]; its get_state and set_state resume it exactly."""
    rows = packed_rows(corpus.documents, config.seq_len, config.seed)
    return iter(rows.batch(config.batch_size, drop_remainder=True))
