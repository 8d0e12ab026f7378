"""The mixture that `[data]` configures (`build_mixture`): random tokens (`MockMixture`) or datasets. No torch.

A rank loads what reads datasets only if it reads them itself: not beside a host's reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megascale.data.mix.mixture_spec import MixtureSpec
from megascale.data.mix.samples import DocumentStarts, Sample, SampleSource, document_starts, label_mask
from megascale.layout.packs import equal_documents

if TYPE_CHECKING:
    from megascale.data.mix.mixture import Mixture


class MockMixture(SampleSource):
    """Uniformly random tokens for speed measurements. The random generator of sample i is seeded with (seed, i). With
    `data.attention_mask = "document"`, documents of `data.document_length` tokens fill the sample.
    """

    def __init__(self, spec: MixtureSpec) -> None:
        self._seed = (spec.seed << 1) + (not spec.is_train)
        self._length, self._vocab = spec.seq_length, spec.vocab_size
        self._mask: np.ndarray | None = None
        self._documents: DocumentStarts | None = None
        if spec.data.attention_mask == "document":
            starts = document_starts(equal_documents(self._length, spec.data.document_length))
            self._documents = DocumentStarts(starts, self._length + 1, self._length)
            self._mask = label_mask(starts, self._length) if spec.data.eod_mask_loss else None

    def __getitem__(self, index: int) -> Sample:
        ids = np.random.default_rng((self._seed, index)).integers(self._vocab, size=self._length + 1)
        return Sample(ids, self._mask, self._documents)

    def source_of(self, index: int) -> str:
        """The origin of a sample, for messages."""
        return "mock data"


def build_mixture(spec: MixtureSpec, expected: int = 0) -> Mixture | MockMixture:
    """Build the mixture that `[data]` configures. `expected`: samples that the run reads."""
    if spec.data.mock:
        return MockMixture(spec)
    from megascale.data.mix.mixture import Mixture

    return Mixture(spec, expected)
