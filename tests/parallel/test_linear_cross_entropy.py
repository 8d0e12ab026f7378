"""The fused head and loss against the definition, for any number of chunks; and its memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megascale.core.rank import Rank
from megascale.layout import loss as layout
from megascale.layout.loss import loss_chunks
from megascale.ops import cross_entropy as module
from megascale.ops.cross_entropy import cross_entropy
from megascale.parallel.linear_cross_entropy import linear_cross_entropy
from megascale.parallel.tp_overlap import TensorParallel
from megascale.parallel.vocabulary import VocabularyRange
from tests.marks import only_quick
from tests.memory import peak_bytes
from tests.model.test_vocabulary import VOCABULARY, B, axis_of, columns, drawn, range_of
from tests.recorded_events import forget_events
from tests.runs import FAMILIES, build_run, config_of, curve_of, send_messages, settings, traffic_of
from tests.worlds import run_world

S, H = 16, 6
LABELS = torch.randint(VOCABULARY, (S, B), generator=torch.Generator().manual_seed(1))
MASK = (torch.rand(S, B, generator=torch.Generator().manual_seed(2)) > 0.2).long()
LAYOUTS = {"tp1": (1, False), "tp2": (2, False), "tp2 sp": (2, True), "tp4 sp": (4, True)}
CHUNKS = (1, 2, 3)


def in_chunks(number: int, tokens: int) -> None:
    """Set the number of chunks for the loss of `tokens` tokens."""
    layout.CHUNK_BYTES, layout.CHUNK_TOKENS = 0, -(-tokens // number)


def head(tp: int, vocab_range: VocabularyRange, dtype: torch.dtype) -> tuple[Tensor, nn.Parameter]:
    """Create x [S, B, H], and this rank's shard of the weight."""
    weight = columns(drawn(H, VOCABULARY, seed=4), vocab_range, padding=0.0).T.contiguous()
    return drawn(S, B, H, seed=5).to(dtype), nn.Parameter(weight.to(dtype))


def results(rank: Rank, tp: int, sequence: bool) -> Any:
    """Compute losses and gradients by (messages or shared memory, dtype, number of chunks).

    The loss with and without gradients; this rank's input gradient; its weight gradient by autograd and in `main_grad`.
    """
    axis = axis_of(rank, tp, sequence)
    measured: dict[Any, Any] = {}
    for messages in (False, True) if tp > 1 else (False,):
        if messages:
            send_messages(axis.group)
        for dtype in (torch.float64, torch.bfloat16):
            for number in CHUNKS:
                in_chunks(number, S * B)
                measured[messages, str(dtype), number] = result(axis, tp, sequence, dtype)
    return measured


def result(axis: TensorParallel, tp: int, sequence: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    vocab_range = range_of(axis)
    x, weight = head(tp, vocab_range, dtype)
    x = (x.chunk(tp)[axis.index] if sequence else x).clone().requires_grad_()
    arguments = (LABELS, MASK, vocab_range, axis, cross_entropy)
    with torch.no_grad():
        alone = linear_cross_entropy(x, weight, *arguments)
    loss = linear_cross_entropy(x, weight, *arguments)
    loss.backward()
    assert x.grad is not None and weight.grad is not None and x.grad.dtype == dtype
    grad_x, by_autograd, x.grad, weight.grad = x.grad, weight.grad, None, None
    weight.main_grad = torch.ones(weight.shape, dtype=torch.promote_types(dtype, torch.float32))  # type: ignore[attr-defined]
    linear_cross_entropy(x, weight, *arguments).backward()
    assert weight.grad is None and torch.equal(x.grad, grad_x)  # type: ignore[arg-type]
    arrays = (t.double().numpy() for t in (grad_x, by_autograd, weight.main_grad - 1))  # type: ignore[attr-defined]
    return (loss.item(), alone.item(), *arrays)


@cache
def ranks_of(layout: str) -> list[Any]:
    return run_world(LAYOUTS[layout][0], results, *LAYOUTS[layout])


@pytest.mark.parametrize("layout", only_quick(LAYOUTS, "tp1", "tp2", "tp2 sp"))
@pytest.mark.parametrize("number", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_equals_the_definition(dtype: torch.dtype, number: int, layout: str) -> None:
    full_range = VocabularyRange(0, VOCABULARY, VOCABULARY)
    x, weight = (t.detach().double().requires_grad_() for t in head(1, full_range, dtype))
    each = F.cross_entropy((x @ weight.T).flatten(0, 1), LABELS.flatten(), reduction="none")
    expected = (each * MASK.flatten()).sum()
    expected.backward()
    tp, sequence = LAYOUTS[layout]
    wide = dtype == torch.float64
    for messages in (False, True) if tp > 1 else (False,):
        measured = [rank[messages, str(dtype), number] for rank in ranks_of(layout)]
        assert len({loss for loss, *_ in measured}) == 1
        for loss, alone, *_ in measured:
            assert loss == alone == pytest.approx(expected.item(), rel=1e-13 if wide else 1e-2)
        _, _, grads, *weights = zip(*measured, strict=True)
        if not sequence:
            assert all((g == grads[0]).all() for g in grads)
        close(torch.cat([torch.from_numpy(g) for g in (grads if sequence else grads[:1])]), x.grad, wide)
        for parts in weights:
            rows = torch.cat([torch.from_numpy(part) for part in parts])
            close(rows[:VOCABULARY], weight.grad, wide)
            assert not rows[VOCABULARY:].any(), "padding has a gradient"


def close(actual: Tensor, expected: Tensor | None, wide: bool) -> None:
    assert expected is not None
    if wide:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
    else:
        assert (actual - expected).norm() < 1e-2 * expected.norm()


def test_an_output_gradient_other_than_1_is_an_error(tmp_path: Any) -> None:
    axis = axis_of(Rank(0, 1, 0, ""), 1)
    x, weight = head(1, range_of(axis), torch.float64)
    loss = linear_cross_entropy(x.requires_grad_(), weight, LABELS, None, range_of(axis), axis, cross_entropy)
    with pytest.raises(RuntimeError, match="the gradient of the loss is not 1"):
        (loss / 2).backward()


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation returns."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        out = function(*arguments, **(options or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_one_chunk_of_logits_exists(dtype: torch.dtype, gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocabulary, width = 512, 2000, 16
    x = torch.randn(tokens, 1, width, dtype=dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(vocabulary, width, dtype=dtype))
    weight.main_grad = torch.zeros(vocabulary, width)  # type: ignore[attr-defined]
    labels = torch.randint(vocabulary, (tokens, 1))
    axis, vocab_range = TensorParallel(axis_of(Rank(0, 1, 0, ""), 1).group), VocabularyRange(0, vocabulary, vocabulary)

    def run() -> None:
        with torch.set_grad_enabled(gradient):
            loss = linear_cross_entropy(x, weight, labels, None, vocab_range, axis, cross_entropy)
            if gradient:
                loss.backward()

    monkeypatch.setattr(layout, "CHUNK_BYTES", 0)
    monkeypatch.setattr(module, "BLOCK_BYTES", 8 * 4 * vocabulary)
    run()
    for most in (512, 256, 128):
        monkeypatch.setattr(layout, "CHUNK_TOKENS", most)
        logits = most * vocabulary * dtype.itemsize
        with Largest() as largest:
            run()
        assert largest.bytes == logits
        if dtype == torch.float32:  # bf16 GEMMs on a CPU allocate temporary buffers
            assert logits <= peak_bytes(run) <= logits + tokens * (3 * 4 * width + 100)


def test_chunks_of_common_models() -> None:
    assert loss_chunks(512, 512, 8192) == 1
    assert loss_chunks(2048, 2048, 64_000 // 8) == 1  # gpt3-175b with tp 8
    assert loss_chunks(8192, 8192, 128_256) == 4  # llama3-8b on one device
    assert loss_chunks(8192, 8192, 128_512 // 8) == 2
    assert loss_chunks(2, 1 << 20, 128_256) == 2, "a position is not split"


RUNS: dict[str, dict[str, Any]] = {
    "micro2": {"batch__micro": 2},
    "tp2": {"parallel__tp": 2},
    "tp2 sp": {"parallel__tp": 2, "parallel__sp": True},
    "dp2 zero2": {"parallel__dp": 2, "parallel__zero": 2},
    "pp2 dp2 gpipe zero2": {"parallel__pp": 2, "parallel__dp": 2, "parallel__zero": 2, "parallel__schedule": "gpipe"},
    "tp2 sp pp2 vpp2": {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2, "parallel__vpp": 2},
}


def train(rank: Rank, configs: list[Any], number: int) -> list[Any]:
    """Train with this number of chunks per micro-batch: the curve and the traffic of step 2, by run."""
    measured, mesh = [], None
    for config in configs:
        in_chunks(number, config.batch.micro * config.model.seq_length)
        run = build_run(rank, config, mesh)
        mesh = run.mesh
        forget_events(mesh.recorder)
        measured.append((curve_of(run, 2), traffic_of(run, step=2)))
    return measured


def configurations(folder: Any, **layout: Any) -> list[Any]:
    return [config_of(settings(family, folder, batch__global=4, **layout), folder) for family in FAMILIES.values()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train in one process with one chunk."""
    return run_world(1, train, configurations(tmp_path_factory.mktemp("alone")), 1)[0]


@pytest.mark.parametrize("layout", only_quick(RUNS, "tp2 sp pp2 vpp2"))
def test_the_number_of_chunks_does_not_change_a_run(layout: str, alone: Any, tmp_path: Any) -> None:
    configs = configurations(tmp_path, **RUNS[layout])
    ranks = run_world(configs[0].world_size, train, configs, 3)
    for config, runs, (expected, _) in zip(configs, zip(*ranks, strict=True), alone, strict=True):
        for curve, traffic in runs:
            assert curve == runs[0][0], "ranks disagree"
            np.testing.assert_allclose(curve, expected, rtol=1e-10)
            if layout.startswith("tp2") and config.parallel.pp == 1:
                check_traffic(config, traffic["tp"], chunks=3)


def check_traffic(config: Any, tp: dict[str, tuple[int, int]], chunks: int) -> None:
    """Check for more calls than with one chunk, and equal bytes (compare tests/parallel/test_traffic.py)."""
    m, micro, sequence = config.model, config.num_microbatches, config.parallel.sp
    activation = 8 * m.seq_length * config.batch.micro * m.hidden_size
    loss = 3 * 8 * m.seq_length * config.batch.micro
    layers = 4 * m.num_layers
    if not sequence:
        calls = micro * (layers + 1 + 3 * chunks)
        assert tp == {"all_reduce": (calls, micro * ((layers + 2) * activation + loss))}
        return
    assert tp["all_gather"] == (
        micro * (layers + 2 * m.num_layers + 1 + chunks),
        micro * (6 * m.num_layers + 2) * activation,
    )
    assert tp["reduce_scatter"] == (micro * (layers + 1 + chunks), micro * (layers + 2) * activation)
    assert tp["all_reduce"][0] == 2 * micro * chunks + 1
