"""Summary of decomposed training data: the share of each bucket, and of what is not read. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.data.mix.mixture import Mixture
from megascale.data.mix.mixture_spec import MixtureSpec
from megascale.data.read.decomposed_index import DecomposedShape


@dataclass(frozen=True)
class BucketSummary:
    """`shares`: (tokens of a piece, share of the samples). Shares of the datasets' tokens that an epoch does not read:
    `short` rests below the shortest piece, and pieces `left` over, which fill no sample.
    """

    shares: list[tuple[int, float]]
    short: float
    left: float

    @property
    def document_length(self) -> int:
        """The length of documents in whose samples attention computes as many scores."""
        return round(sum(piece * share for piece, share in self.shares))

    def __str__(self) -> str:
        lengths = ", ".join(f"{piece} {share:.1%}" for piece, share in self.shares)
        unread = f"{self.short:.2%} of the tokens are rests below {self.shares[0][0]} and are not read"
        left = f", nor are {self.left:.2%} in pieces that fill no sample of an epoch" if self.left else ""
        return (
            f"samples by the tokens of their pieces: {lengths}; {unread}{left}; "
            f"attention computes as many scores as with data.document_length = {self.document_length}"
        )


def summarize_buckets(mixture: Mixture) -> BucketSummary:
    """Summarize the training data of a run with `data.packing = "decompose"`, from the lengths of the documents.

    Raises: DataError for unusable datasets, and one whose buckets are all empty
    """
    samples = mixture.bucket_samples()
    count = len(samples[0])
    found: dict[int, float] = {}
    short, left = 1.0, 0.0
    for number, (weight, row) in enumerate(zip(mixture.shares, samples, strict=True)):
        for dataset in mixture.datasets[number * count : (number + 1) * count]:
            shape = dataset.shape
            assert isinstance(shape, DecomposedShape), "a training sample is of a bucket"
            found[shape.piece] = found.get(shape.piece, 0.0) + weight * shape.samples / sum(row)
            in_pieces, part = shape.pieces * shape.piece, weight / shape.tokens
            short -= in_pieces * part
            left += (in_pieces - shape.samples * shape.seq_length) * part
    return BucketSummary(sorted(found.items()), max(short, 0.0), left)


def describe_buckets(spec: MixtureSpec) -> str:
    """Describe the buckets of decomposed training data in a line."""
    return str(summarize_buckets(Mixture(spec)))
