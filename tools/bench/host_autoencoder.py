"""Minder's denoiser (arXiv:2411.01791): an LSTM-VAE for a metric, which reconstructs windows of a host's samples.

It stands here to be compared with plain means of windows (`host_outliers.py --autoencoder`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

WINDOW, HIDDEN, LATENT = 8, 4, 8
"""Samples of a window, and sizes of the LSTMs and of the latent vector, as in the paper."""

Values = NDArray[np.floating]

STEPS, BATCH, LEARNING_RATE, KL_WEIGHT = 1500, 512, 3e-3, 1e-3


class Vae(nn.Module):
    """An LSTM-VAE of windows [batch, WINDOW]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(1, HIDDEN, batch_first=True)
        self.mean, self.log_variance = nn.Linear(HIDDEN, LATENT), nn.Linear(HIDDEN, LATENT)
        self.decoder = nn.LSTM(LATENT, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, 1)

    def forward(self, windows: Tensor, noise: bool = False) -> tuple[Tensor, Tensor]:
        """Return the reconstruction, and the divergence of the latent vectors from the prior."""
        _, (hidden, _) = self.encoder(windows[..., None])
        mean, log_variance = self.mean(hidden[0]), self.log_variance(hidden[0])
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() * noise
        decoded, _ = self.decoder(latent[:, None].expand(-1, WINDOW, -1))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return self.output(decoded)[..., 0], divergence


class Denoiser:
    """A trained VAE, and the range of the metric, which is mapped to -1..1."""

    def __init__(self, vae: Vae, low: float, high: float) -> None:
        self._vae, self._low, self._high = vae, low, high

    def scale(self, values: Values) -> Values:
        """Return values of the metric on the scale of the VAE."""
        return 2 * (values - self._low) / (self._high - self._low) - 1

    @torch.no_grad()
    def denoise(self, values: Values) -> Values:
        """Return values [times, series] where each is the mean of its reconstructions in all windows."""
        missing = np.isnan(values)
        present = np.where(missing, np.nanmedian(values, axis=1, keepdims=True), values)
        windows = np.lib.stride_tricks.sliding_window_view(self.scale(present), WINDOW, axis=0)
        flat = torch.from_numpy(np.ascontiguousarray(windows.reshape(-1, WINDOW), dtype=np.float32))
        back = torch.cat([self._vae(part)[0] for part in flat.split(1 << 16)]).numpy().reshape(windows.shape)
        total, count = np.zeros(values.shape), np.zeros((len(values), 1))
        for place in range(WINDOW):
            total[place : place + len(back)] += back[..., place]
            count[place : place + len(back)] += 1
        restored = (total / count + 1) / 2 * (self._high - self._low) + self._low
        return np.where(missing, np.nan, restored)


def train_denoiser(series: Sequence[Values], steps: int = STEPS) -> tuple[Denoiser, float]:
    """Train on values [times, series] of healthy fleets, and return the denoiser and the mean squared error."""
    torch.manual_seed(0)
    values = np.concatenate([one.ravel() for one in series])
    low, high = np.nanpercentile(values, (0.1, 99.9))
    denoiser = Denoiser(vae := Vae(), float(low), float(high))
    windows = np.concatenate(
        [
            np.lib.stride_tricks.sliding_window_view(denoiser.scale(one), WINDOW, axis=0).reshape(-1, WINDOW)
            for one in series
        ]
    )
    windows = windows[~np.isnan(windows).any(axis=1)].astype(np.float32)
    optimizer = torch.optim.Adam(vae.parameters(), LEARNING_RATE)
    errors: list[float] = []
    for _ in range(steps):
        batch = torch.from_numpy(windows[np.random.default_rng(len(errors)).integers(len(windows), size=BATCH)])
        back, divergence = vae(batch, noise=True)
        error = (back - batch).square().mean()
        optimizer.zero_grad()
        (error + KL_WEIGHT * divergence).backward()
        optimizer.step()
        errors.append(error.item())
    return denoiser, float(np.mean(errors[-100:]))
