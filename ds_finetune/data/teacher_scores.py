"""Stores a teacher's distributions for distillation: for each supervised token, the probabilities of the k most likely
next tokens, and of all others together.

A folder of scores has a manifest, which is written last, and a folder for each shard of consecutive documents.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.data.cache import ArrayParts, find_damage, write_folder
from ds_finetune.data.documents import Documents
from ds_finetune.errors import DataError, OutputError
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import TopLogProbs
from ds_finetune.system.whole_file import replace_file

FORMAT_VERSION = 1
_MANIFEST = "scores.json"
_IDENTITY = "identity.json"
_HASHED = 2**22


@dataclass(frozen=True)
class ScoreIdentity:
    """Data, teacher and settings behind a teacher's scores; equal for all shards of a folder."""

    documents: str
    """Hash of the token ids and masks of all documents that the teacher scored, in order."""
    tokenizer: str
    """Hash of the vocabulary (token to id) of the tokenizer for which the scores were computed."""
    vocabulary: int
    """Vocabulary size of the scored model, including unused ids."""
    teacher: str
    precision: str
    top_k: int
    shard_documents: int
    """Number of documents per shard of scores; the last shard may have fewer."""
    format: int = FORMAT_VERSION


@dataclass(frozen=True)
class DocumentScores:
    """A teacher's distributions for the supervised tokens of one document, in order."""

    ids: NDArray[np.int32]
    """Ids of the teacher's k most likely next tokens, most likely first, [supervised tokens, k]."""
    log_probs: NDArray[np.float16]
    """Teacher's log-probabilities of the tokens `ids`, and in the last column the log of the probability of all other
    tokens, in nats at temperature 1, [supervised tokens, k + 1].
    """


class StoredScores:
    """A teacher's scores in a folder, read by document index from memory maps."""

    def __init__(self, folder: Path, identity: ScoreIdentity, num_shards: int) -> None:
        self.folder, self.identity = folder, identity
        self._shards = [_open_shard(folder / shard_name(number), identity.top_k) for number in range(num_shards)]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a teacher's scores in `folder`; DataError where they are incomplete or differ from their checksums."""
        try:
            manifest = json.loads((folder / _MANIFEST).read_bytes())
            identity, num_shards = ScoreIdentity(**manifest["identity"]), int(manifest["shards"])
        except FileNotFoundError:
            raise DataError(
                f"{folder} has no {_MANIFEST}: it holds no scores, or `ds-finetune teach` has not finished",
                hint="run the same `ds-finetune teach` again; it continues where it stopped",
            ) from None
        except (ValueError, TypeError, KeyError) as wrong:
            raise DataError(
                f"{folder / _MANIFEST} cannot be read: {wrong}", hint="run `ds-finetune teach` again"
            ) from wrong
        for number in range(num_shards):
            if damage := find_damage(folder / shard_name(number)):
                raise DataError(
                    f"the teacher's scores are damaged: {damage}",
                    hint=f"remove {folder / shard_name(number)} and {folder / _MANIFEST}, and run `ds-finetune teach` "
                    "again; it writes what is missing",
                )
        return cls(folder, identity, num_shards)

    def __getitem__(self, number: int) -> DocumentScores:
        shard, index = divmod(number, self.identity.shard_documents)
        ids, log_probs, offsets = self._shards[shard]
        span = slice(offsets[index], offsets[index + 1])
        return DocumentScores(ids[span], log_probs[span])

    def check(self, documents: Documents, tokens: Mapping[str, int], vocabulary: int) -> None:
        """Raise DataError where the teacher's scores belong to other documents, tokenizers or vocabularies."""
        stored = self.identity
        for kind, theirs, ours in (
            ("vocabulary size", stored.vocabulary, vocabulary),
            ("tokenizer", stored.tokenizer, tokens_hash(tokens)),
            ("training rows", stored.documents, documents_hash(documents)),
        ):
            if theirs != ours:
                raise DataError(
                    f"the scores in {self.folder} are of another {kind}: {theirs} there, {ours} in this run",
                    hint="write scores with this run file: ds-finetune teach TEACHER RUN.yaml OUT",
                )


def _open_shard(folder: Path, top_k: int) -> tuple[NDArray[np.int32], NDArray[np.float16], NDArray[np.int64]]:
    names = ("ids", "log_probs", "offsets")
    ids, log_probs, offsets = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in names)
    return ids.reshape(-1, top_k), log_probs.reshape(-1, top_k + 1), offsets


def shard_name(number: int) -> str:
    """Folder name of the teacher's scores of shard `number`."""
    return f"shard-{number:06d}"


def write_shard(folder: Path, number: int, scores: Sequence[DocumentScores], identity: ScoreIdentity) -> None:
    """Write the teacher's scores of consecutive documents. The folder of the shard appears once it is complete."""
    offsets = np.cumsum([0, *(len(part.ids) for part in scores)]).astype(np.int64)
    flat = {name: [getattr(part, name).reshape(-1) for part in scores] for name in ("ids", "log_probs")}
    arrays = {name: ArrayParts(parts[0].dtype, sum(map(len, parts)), parts) for name, parts in flat.items()}
    text = json.dumps(asdict(identity), indent=1)
    write_folder(folder / shard_name(number), arrays | {"offsets": ArrayParts.of(offsets)}, {_IDENTITY: text})


def is_shard_complete(folder: Path, number: int, identity: ScoreIdentity) -> bool:
    """Whether shard `number` is complete; a damaged shard is removed. OutputError if its identity is not `identity`."""
    shard = folder / shard_name(number)
    if not shard.is_dir():
        return False
    if find_damage(shard):
        shutil.rmtree(shard)
        return False
    stored = json.loads((shard / _IDENTITY).read_bytes())
    if stored != asdict(identity):
        names = [name for name, value in asdict(identity).items() if stored.get(name) != value]
        changed = [f"{name} {stored.get(name)!r} there, {getattr(identity, name)!r} now" for name in names]
        raise OutputError(
            f"folder {folder} holds scores of other inputs: {'; '.join(changed)}",
            hint="name another folder for the scores, or remove this one",
        )
    return True


def write_manifest(folder: Path, identity: ScoreIdentity, num_shards: int, remarks: Mapping[str, object]) -> None:
    """Write the manifest, which marks a folder of teacher's scores as complete. No program reads its `remarks`."""
    text = json.dumps({"identity": asdict(identity), "shards": num_shards, **remarks}, indent=1)
    try:
        replace_file(folder / _MANIFEST, text + "\n")
    except OSError as failed:
        raise OutputError(
            f"{folder / _MANIFEST} cannot be written: {failed.strerror}",
            hint="free space there, or name another folder",
        ) from failed


def with_scores(batches: Iterator[Batch], scores: StoredScores) -> Iterator[Batch]:
    """Add to each batch the teacher's distributions for its supervised tokens, as `MicroBatch.examples`."""
    for batch in batches:
        yield replace(batch, micro=tuple(_with_scores(micro, scores) for micro in batch.micro))


def _with_scores(micro: MicroBatch, scores: StoredScores) -> MicroBatch:
    assert micro.examples is not None
    top_k, rows = scores.identity.top_k, micro.labels.shape
    ids, log_probs = np.zeros((*rows, top_k), np.int32), np.zeros((*rows, top_k + 1), np.float16)
    # Scores of all documents can be concatenated: documents are in the order of the rows, and none is split.
    documents = [scores[number] for number in micro.examples.numbers.tolist()]
    is_supervised = (micro.labels != IGNORE_INDEX).numpy()
    if documents:
        ids[is_supervised] = np.concatenate([part.ids for part in documents])
        log_probs[is_supervised] = np.concatenate([part.log_probs for part in documents])
    top = TopLogProbs(torch.from_numpy(ids), torch.from_numpy(log_probs))
    return replace(micro, examples=replace(micro.examples, top=top))


def documents_hash(documents: Documents) -> str:
    """Hash of the ids, masks and lengths of all documents; the same on every machine."""
    digest = xxhash.xxh3_64()
    for array in (documents.ids, documents.mask, documents.offsets):
        for start in range(0, len(array), _HASHED):
            part = array[start : start + _HASHED]
            digest.update(np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def tokens_hash(tokens: Mapping[str, int]) -> str:
    """Hash of a tokenizer's vocabulary, token to id."""
    text = json.dumps(sorted(tokens.items()), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
