"""Sequences, sounds and fields: recurrent nets, CTC, Fourier transforms, scans, linear algebra."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sweep.common import DEVICE, ids, randn, train


def translator_cells() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.enc = nn.Embedding(8000, 256), nn.GRU(256, 256, bidirectional=True, batch_first=True)
            self.cell, self.mix, self.out = nn.LSTMCell(256 + 512, 512), nn.Linear(512, 512), nn.Linear(1024, 8000)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen, _ = self.enc(self.words(x))
            h = c = context = seen.new_zeros(x.shape[0], 512)
            made = []
            for t in range(y.shape[1]):
                h, c = self.cell(torch.cat([self.words(y[:, t]), context], 1), (h, c))
                weight = torch.bmm(seen, self.mix(h)[:, :, None]).softmax(1)
                context = (weight * seen).sum(1)
                made.append(self.out(torch.cat([h, context], 1)))
            return torch.stack(made, 1)

    net = Net().to(DEVICE)

    def loss() -> torch.Tensor:
        y = ids(8000, 32, 24)
        return F.cross_entropy(net(ids(8000, 32, 40), y).transpose(1, 2), y)

    train(loss, torch.optim.Adam(net.parameters(), lr=1e-3), steps=2, clip=1.0)


def packed_language() -> None:
    words, net, out = nn.Embedding(10_000, 512).to(DEVICE), nn.LSTM(512, 512, 2, dropout=0.2, batch_first=True).to(DEVICE), nn.Linear(512, 10_000).to(DEVICE)

    def loss() -> torch.Tensor:
        lengths = torch.linspace(96, 20, 48).long()
        x = ids(10_000, 48, 96)
        packed = nn.utils.rnn.pack_padded_sequence(words(x), lengths, batch_first=True)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)
        return F.cross_entropy(out(hidden).flatten(0, 1), x.flatten())

    train(loss, torch.optim.SGD([*words.parameters(), *net.parameters(), *out.parameters()], lr=1.0), clip=0.25)


def speech_ctc() -> None:
    front, net, out = nn.Sequential(nn.Conv2d(1, 32, (11, 5), (2, 2), (5, 2)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20, inplace=True)).to(DEVICE), nn.GRU(32 * 40, 384, 2, bidirectional=True).to(DEVICE), nn.Linear(768, 29).to(DEVICE)

    def loss() -> torch.Tensor:
        x = front(randn(16, 1, 80, 600))
        x = net(x.flatten(1, 2).permute(2, 0, 1).contiguous())[0]
        logits = out(x).log_softmax(-1)
        return F.ctc_loss(logits, 1 + ids(28, 16, 60), torch.full((16,), 300), torch.full((16,), 60), zero_infinity=True)

    train(loss, torch.optim.AdamW([*front.parameters(), *net.parameters(), *out.parameters()], lr=1e-4), clip=5.0)


def spectral_loss() -> None:
    net = nn.Sequential(nn.Conv1d(1, 64, 15, padding=7), nn.PReLU(), *(m for d in (2, 4, 8) for m in (nn.Conv1d(64, 64, 5, padding=2 * d, dilation=d), nn.PReLU())), nn.Conv1d(64, 1, 15, padding=7)).to(DEVICE)

    def loss() -> torch.Tensor:
        clean = randn(8, 32000)
        made = net((clean + randn(8, 32000))[:, None]).squeeze(1)
        whole = F.l1_loss(made, clean)
        for size in (512, 1024, 2048):
            window = torch.hann_window(size, device=DEVICE)
            a, b = (torch.stft(s, size, size // 4, window=window, return_complex=True).abs() for s in (made, clean))
            whole = whole + F.l1_loss(a, b) + F.mse_loss((a + 1e-5).log(), (b + 1e-5).log())
        return whole

    train(loss, torch.optim.Adam(net.parameters(), lr=1e-4))


def fourier_operator() -> None:
    class Spectral(nn.Module):
        def __init__(self, width: int, modes: int) -> None:
            super().__init__()
            self.weight, self.modes = nn.Parameter(torch.randn(2, width, width, modes, modes, dtype=torch.cfloat) / width**2), modes

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            m, f = self.modes, torch.fft.rfft2(x)
            out = torch.zeros_like(f)
            out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", f[:, :, :m, :m], self.weight[0])
            out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", f[:, :, -m:, :m], self.weight[1])
            return torch.fft.irfft2(out, s=x.shape[-2:])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.out = nn.Conv2d(3, 48, 1), nn.Conv2d(48, 1, 1)
            self.far, self.near = nn.ModuleList(Spectral(48, 12) for _ in range(3)), nn.ModuleList(nn.Conv2d(48, 48, 1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.lift(x)
            for far, near in zip(self.far, self.near, strict=True):
                x = F.gelu(far(x) + near(x))
            return self.out(x)

    net = Net().to(DEVICE)
    train(lambda: F.mse_loss(net(randn(16, 3, 96, 96)), randn(16, 1, 96, 96)), torch.optim.Adam(net.parameters(), lr=1e-3))


def long_convolution() -> None:
    class Layer(nn.Module):
        def __init__(self, width: int, states: int = 32) -> None:
            super().__init__()
            self.step, self.decay, self.mix = nn.Parameter(torch.rand(width)), nn.Parameter(torch.randn(width, states, 2)), nn.Parameter(torch.randn(width, states, 2))
            self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            length = x.shape[1]
            a, c = -torch.exp(torch.view_as_complex(self.decay)), torch.view_as_complex(self.mix)
            power = torch.exp(a[..., None] * self.step[:, None, None] * torch.arange(length, device=x.device))
            kernel = 2 * torch.einsum("hn,hnl->hl", c, power).real
            u = self.norm(x).transpose(1, 2)
            y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length), n=2 * length)[..., :length]
            return x + F.glu(self.out(F.gelu(y).transpose(1, 2)), -1)

    net = nn.Sequential(nn.Linear(1, 128), *(Layer(128) for _ in range(4)), nn.Linear(128, 10)).to(DEVICE)
    train(lambda: F.cross_entropy(net(randn(16, 1024, 1)).mean(1), ids(10, 16)), torch.optim.AdamW(net.parameters(), lr=1e-3))


def selective_scan() -> None:
    class Layer(nn.Module):
        def __init__(self, width: int, states: int = 16) -> None:
            super().__init__()
            self.inner, self.conv, self.proj, self.out = nn.Linear(width, 4 * width), nn.Conv1d(2 * width, 2 * width, 4, padding=3, groups=2 * width), nn.Linear(2 * width, 2 * states + 1), nn.Linear(2 * width, width)
            self.a, self.states = nn.Parameter(torch.rand(2 * width, states)), states

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            u, gate = self.inner(x).chunk(2, -1)
            u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
            b, c, step = self.proj(u).split([self.states, self.states, 1], -1)
            step, h, ys = F.softplus(step), 0.0, []
            decay, add = torch.exp(-step[..., None] * self.a), (step * u)[..., None] * b[:, :, None]
            for t in range(x.shape[1]):
                h = decay[:, t] * h + add[:, t]
                ys.append((h * c[:, t, None]).sum(-1))
            return x + self.out(torch.stack(ys, 1) * F.silu(gate))

    net = nn.Sequential(nn.Embedding(1000, 256), Layer(256), Layer(256), nn.Linear(256, 1000)).to(DEVICE)

    def loss() -> torch.Tensor:
        x = ids(1000, 8, 96)
        return F.cross_entropy(net(x).flatten(0, 1), x.flatten())

    train(loss, torch.optim.AdamW(net.parameters(), lr=1e-3), steps=2, autocast=torch.bfloat16)


def gaussian_process() -> None:
    x, y = randn(2048, 8), randn(2048)
    scale, noise = torch.zeros(8, device=DEVICE, requires_grad=True), torch.zeros((), device=DEVICE, requires_grad=True)

    def loss() -> torch.Tensor:
        z = x * scale.exp()
        kernel = torch.exp(-0.5 * torch.cdist(z, z) ** 2) + (noise.exp() + 0.1) * torch.eye(2048, device=DEVICE)
        low = torch.linalg.cholesky(kernel)
        half = torch.linalg.solve_triangular(low, y[:, None], upper=False)
        return 0.5 * half.square().sum() + low.diagonal().log().sum()

    train(loss, torch.optim.Adam([scale, noise], lr=0.1))


def decompositions() -> None:
    a = randn(512, 512)
    many = randn(64, 32, 32)
    with torch.no_grad():
        square = a @ a.T + torch.eye(512, device=DEVICE)
        for one in (torch.linalg.svd(a), torch.linalg.qr(a), torch.linalg.eigh(square), torch.linalg.cholesky(square), torch.linalg.solve(square, a), torch.linalg.inv(square), torch.linalg.lstsq(a, a[:, :8]), torch.linalg.det(many), torch.linalg.svdvals(many), torch.linalg.eigh(many + many.mT)):
            del one
    w = nn.Linear(512, 512).to(DEVICE)

    def loss() -> torch.Tensor:
        z = w(a)
        _, values, _ = torch.linalg.svd(z, full_matrices=False)
        cov = z.T @ z / 512 + 1e-3 * torch.eye(512, device=DEVICE)
        return values.sum() + torch.logdet(cov) + torch.linalg.inv(cov).trace()

    train(loss, torch.optim.SGD(w.parameters(), lr=0.01))


def transducer_joint() -> None:
    enc, dec, words, out = nn.LSTM(80, 320, batch_first=True).to(DEVICE), nn.LSTM(128, 320, batch_first=True).to(DEVICE), nn.Embedding(512, 128).to(DEVICE), nn.Linear(320, 512).to(DEVICE)

    def loss() -> torch.Tensor:
        y = ids(512, 8, 32)
        joint = out(torch.tanh(enc(randn(8, 150, 80))[0][:, :, None] + dec(words(y))[0][:, None]))
        told = joint.log_softmax(-1)
        return -(told[..., 0].logsumexp(1).mean() + told.gather(3, y[:, None, :, None].expand(-1, 150, -1, 1)).mean())

    train(loss, torch.optim.Adam([*enc.parameters(), *dec.parameters(), *words.parameters(), *out.parameters()], lr=1e-3))


WORKLOADS = (translator_cells, packed_language, speech_ctc, spectral_loss, fourier_operator, long_convolution, selective_scan, gaussian_process, decompositions, transducer_joint)
