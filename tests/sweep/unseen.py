"""Workloads that were written after the rules were mended with the others, and predicted before they were measured."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sweep.common import DEVICE, conv_norm, ids, randn, train
from sweep.texts import made


def roberta_labels() -> None:
    net = made("RobertaForSequenceClassification", num_hidden_layers=6, vocab_size=50265, max_position_embeddings=514, num_labels=5)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-5, fused=True)

    def loss() -> Any:
        x = ids(50000, 24, 192) + 5
        mask = (torch.arange(192, device=DEVICE)[None] < torch.linspace(80, 192, 24, device=DEVICE)[:, None]).long()
        return net(input_ids=x, attention_mask=mask, labels=ids(5, 24)).loss

    train(loss, optimizer, autocast=torch.float16, scaled=True, clip=1.0)


def marian_summaries() -> None:
    net = made("PegasusForConditionalGeneration", d_model=512, encoder_layers=3, decoder_layers=3, encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, vocab_size=32000)
    train(lambda: net(input_ids=ids(32000, 12, 320), labels=ids(32000, 12, 80)).loss, torch.optim.AdamW(net.parameters(), lr=1e-4), clip=0.5)


def phi_prefill_decode() -> None:
    net = made("Phi3ForCausalLM", torch.bfloat16, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=4, vocab_size=32064, pad_token_id=0, sliding_window=None).eval()
    x = ids(32000, 6, 800)
    with torch.inference_mode():
        net.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=16, min_new_tokens=16, do_sample=True, top_p=0.9)


def olmo_lengths() -> None:
    net = made("OlmoForCausalLM", torch.bfloat16, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=16, vocab_size=50304)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for length in (700, 350, 900, 512):
        x = ids(50304, 4, length)
        net(input_ids=x, labels=x, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def beit_fp32() -> None:
    net = made("BeitForImageClassification", num_hidden_layers=5, num_labels=100, use_relative_position_bias=True, hidden_dropout_prob=0.1)
    train(lambda: net(pixel_values=randn(32, 3, 224, 224), labels=ids(100, 32)).loss, torch.optim.AdamW(net.parameters(), lr=1e-4), steps=3)


def resnet_hf_last() -> None:
    net = made("ResNetForImageClassification", num_labels=1000, depths=[2, 3, 4, 2]).to(memory_format=torch.channels_last)
    train(lambda: net(pixel_values=randn(48, 3, 224, 224).to(memory_format=torch.channels_last), labels=ids(1000, 48)).loss, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4), autocast=torch.float16, scaled=True)


def regnet_fp32() -> None:
    net = made("RegNetForImageClassification", num_labels=1000, depths=[1, 2, 4, 2], hidden_sizes=[64, 128, 320, 768], groups_width=16)
    train(lambda: net(pixel_values=randn(32, 3, 224, 224), labels=ids(1000, 32)).loss, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))


def hubert_ctc() -> None:
    net = made("HubertForCTC", num_hidden_layers=3, vocab_size=32, mask_time_prob=0.0, pad_token_id=31)
    train(lambda: net(input_values=randn(4, 48000), labels=ids(31, 4, 30)).loss, torch.optim.Adam(net.parameters(), lr=1e-5), autocast=torch.bfloat16)


class Gated(nn.Module):
    """A mixer of tokens and channels: no attention."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = nn.Sequential(nn.Linear(count, 256), nn.GELU(), nn.Linear(256, count)), nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.a(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.b(x))


def mixer_bf16() -> None:
    front = nn.Conv2d(3, 512, 16, 16)
    net = nn.Sequential(front, nn.Flatten(2)).to(DEVICE)
    body, head = nn.Sequential(*(Gated(196, 512) for _ in range(8))).to(DEVICE), nn.Linear(512, 1000).to(DEVICE)
    train(lambda: F.cross_entropy(head(body(net(randn(64, 3, 224, 224)).transpose(1, 2)).mean(1)), ids(1000, 64)), torch.optim.AdamW([*net.parameters(), *body.parameters(), *head.parameters()], lr=1e-3), autocast=torch.bfloat16)


def shuffle_fp32() -> None:
    class Unit(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            half = width // 2
            self.body = nn.Sequential(conv_norm(half, half, 1), nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False), nn.BatchNorm2d(half), conv_norm(half, half, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, 1)
            y = torch.cat([a, self.body(b)], 1)
            n, c, h, w = y.shape
            return y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)

    net = nn.Sequential(conv_norm(3, 48, 3, 2), nn.MaxPool2d(3, 2, 1), *(Unit(48) for _ in range(3)), conv_norm(48, 192, 3, 2), *(Unit(192) for _ in range(4)), conv_norm(192, 384, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, 1000)).to(DEVICE)
    train(lambda: F.cross_entropy(net(randn(64, 3, 224, 224)), ids(1000, 64)), torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, weight_decay=4e-5))


def segment_atrous() -> None:
    class Pyramid(nn.Module):
        def __init__(self, cin: int) -> None:
            super().__init__()
            self.parts = nn.ModuleList([conv_norm(cin, 128, 1), *(nn.Sequential(nn.Conv2d(cin, 128, 3, padding=d, dilation=d, bias=False), nn.BatchNorm2d(128), nn.ReLU()) for d in (6, 12, 18))])
            self.whole, self.out = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(cin, 128, 1), nn.ReLU()), conv_norm(640, 128, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = [p(x) for p in self.parts]
            seen.append(F.interpolate(self.whole(x), size=x.shape[-2:], mode="bilinear", align_corners=False))
            return self.out(torch.cat(seen, 1))

    net = nn.Sequential(conv_norm(3, 64, 7, 2), conv_norm(64, 128, 3, 2), conv_norm(128, 256, 3, 2), conv_norm(256, 256), Pyramid(256), nn.Dropout(0.5), nn.Conv2d(128, 21, 1)).to(DEVICE)

    def loss() -> torch.Tensor:
        return F.cross_entropy(F.interpolate(net(randn(8, 3, 320, 320)), size=(320, 320), mode="bilinear", align_corners=False), ids(21, 8, 320, 320), ignore_index=255)

    train(loss, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9))


def codec_1d() -> None:
    def unit(width: int, dilation: int) -> nn.Module:
        return nn.Sequential(nn.ELU(), nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 7, padding=3 * dilation, dilation=dilation)), nn.ELU(), nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 1)))

    enc = nn.Sequential(nn.Conv1d(1, 32, 7, padding=3), unit(32, 1), nn.Conv1d(32, 64, 4, 2, 1), unit(64, 3), nn.Conv1d(64, 128, 8, 4, 2), unit(128, 9), nn.Conv1d(128, 256, 16, 8, 4)).to(DEVICE)
    dec = nn.Sequential(nn.ConvTranspose1d(256, 128, 16, 8, 4), unit(128, 1), nn.ConvTranspose1d(128, 64, 8, 4, 2), unit(64, 1), nn.ConvTranspose1d(64, 1, 4, 2, 1), nn.Tanh()).to(DEVICE)

    def loss() -> torch.Tensor:
        x = randn(12, 1, 32000)
        y = dec(enc(x))
        a, b = (torch.stft(s.squeeze(1), 1024, 256, window=torch.hann_window(1024, device=DEVICE), return_complex=True).abs() for s in (x, y))
        return F.l1_loss(y, x) + F.mse_loss(b, a)

    train(loss, torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=1e-4))


def pix2pix() -> None:
    class Gen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (64, 128, 256, 512)
            self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(3 if i == 0 else widths[i - 1], w, 4, 2, 1), nn.InstanceNorm2d(w), nn.LeakyReLU(0.2)) for i, w in enumerate(widths))
            self.up = nn.ModuleList(nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.InstanceNorm2d(b), nn.ReLU()) for a, b in ((512, 256), (512, 128), (256, 64)))
            self.last = nn.ConvTranspose2d(128, 3, 4, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for d in self.down:
                x = d(x)
                kept.append(x)
            kept.pop()
            for u in self.up:
                x = torch.cat([u(x), kept.pop()], 1)
            return torch.tanh(self.last(x))

    gen, judge = Gen().to(DEVICE), nn.Sequential(nn.Conv2d(6, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.LeakyReLU(0.2), nn.Conv2d(128, 1, 4, 1, 1)).to(DEVICE)
    first, second = torch.optim.Adam(gen.parameters(), lr=2e-4), torch.optim.Adam(judge.parameters(), lr=2e-4)
    for _ in range(3):
        a, b = randn(8, 3, 128, 128), randn(8, 3, 128, 128)
        fake = gen(a)
        told = judge(torch.cat([a, fake.detach()], 1))
        seen = judge(torch.cat([a, b], 1))
        second.zero_grad()
        (F.mse_loss(told, torch.zeros_like(told)) + F.mse_loss(seen, torch.ones_like(seen))).backward()
        second.step()
        first.zero_grad()
        again = judge(torch.cat([a, fake], 1))
        (F.mse_loss(again, torch.ones_like(again)) + 100 * F.l1_loss(fake, b)).backward()
        first.step()


def two_tower_sparse() -> None:
    user, item = nn.Embedding(300_000, 96, sparse=True).to(DEVICE), nn.EmbeddingBag(300_000, 96, sparse=True, mode="mean").to(DEVICE)
    top = nn.Sequential(nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 1)).to(DEVICE)
    first, second = torch.optim.SGD([user.weight, item.weight], lr=0.1), torch.optim.AdamW(top.parameters())
    for _ in range(3):
        x = torch.cat([user(ids(300_000, 8192)), item(ids(300_000, 8192, 6))], 1)
        F.binary_cross_entropy_with_logits(top(x).squeeze(1), torch.rand(8192, device=DEVICE).round()).backward()
        first.step()
        second.step()
        user.zero_grad(), item.zero_grad(), top.zero_grad()


def message_passing_max() -> None:
    nodes, edges = 30_000, 240_000
    a, b = ids(nodes, edges), ids(nodes, edges)
    first, second, out = nn.Linear(128, 128).to(DEVICE), nn.Linear(256, 128).to(DEVICE), nn.Linear(128, 16).to(DEVICE)
    x, y = randn(nodes, 64), ids(16, nodes)

    def loss() -> torch.Tensor:
        m = F.relu(first(torch.cat([x[a], x[b]], 1)))
        pooled = torch.zeros(nodes, 128, device=DEVICE).scatter_reduce(0, b[:, None].expand(-1, 128), m, "amax", include_self=False)
        mean = torch.zeros(nodes, 128, device=DEVICE).scatter_reduce(0, b[:, None].expand(-1, 128), m, "mean")
        return F.cross_entropy(out(F.relu(second(torch.cat([pooled, mean], 1)))), y)

    train(loss, torch.optim.Adam([*first.parameters(), *second.parameters(), *out.parameters()], lr=0.01))


def kernel_regression() -> None:
    net = nn.Sequential(nn.Linear(32, 256), nn.SiLU(), nn.Linear(256, 64)).to(DEVICE)

    def loss() -> torch.Tensor:
        z = net(randn(1536, 32))
        k = torch.exp(-torch.cdist(z, z).square() / 2) + 0.1 * torch.eye(1536, device=DEVICE)
        target = randn(1536, 4)
        weights = torch.linalg.solve(k, target)
        sign, size = torch.linalg.slogdet(k)
        return (target * weights).sum() + size * sign

    train(loss, torch.optim.Adam(net.parameters(), lr=1e-3))


def spectral_conv_1d() -> None:
    weight = nn.Parameter(torch.randn(64, 64, 40, dtype=torch.cfloat, device=DEVICE) / 64)
    lift, out = nn.Conv1d(2, 64, 1).to(DEVICE), nn.Conv1d(64, 1, 1).to(DEVICE)

    def loss() -> torch.Tensor:
        x = lift(randn(32, 2, 2048))
        f = torch.fft.rfft(x)
        g = torch.zeros_like(f)
        g[..., :40] = torch.einsum("bix,iox->box", f[..., :40], weight)
        return F.mse_loss(out(F.gelu(torch.fft.irfft(g, n=2048) + x)), randn(32, 1, 2048))

    train(loss, torch.optim.Adam([weight, *lift.parameters(), *out.parameters()], lr=1e-3))


def gru_forecaster() -> None:
    net, out = nn.GRU(24, 256, 2, batch_first=True, dropout=0.1).to(DEVICE), nn.Linear(256, 24).to(DEVICE)

    def loss() -> torch.Tensor:
        x = randn(256, 96, 24)
        hidden, state = net(x)
        made, step = [], x[:, -1:]
        for _ in range(8):
            y, state = net(step, state)
            step = out(y)
            made.append(step)
        return F.smooth_l1_loss(torch.cat(made, 1), randn(256, 8, 24)) + 0.1 * F.mse_loss(out(hidden), x)

    train(loss, torch.optim.AdamW([*net.parameters(), *out.parameters()], lr=1e-3), clip=1.0)


def decision_sequence() -> None:
    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads, self.n1, self.n2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.o, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, s, w = x.shape
            q, k, v = self.qkv(self.n1(x)).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
            x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1).transpose(1, 2).reshape(b, s, w))
            return x + self.mlp(self.n2(x))

    state, action, reward, body, out = nn.Linear(17, 384).to(DEVICE), nn.Linear(6, 384).to(DEVICE), nn.Linear(1, 384).to(DEVICE), nn.Sequential(*(Block(384, 6) for _ in range(4))).to(DEVICE), nn.Linear(384, 6).to(DEVICE)

    def loss() -> torch.Tensor:
        s, a, r = randn(64, 80, 17), randn(64, 80, 6), randn(64, 80, 1)
        x = torch.stack([reward(r), state(s), action(a)], 2).flatten(1, 2)
        return F.mse_loss(torch.tanh(out(body(x)[:, 1::3])), a)

    train(loss, torch.optim.AdamW([p for m in (state, action, reward, body, out) for p in m.parameters()], lr=1e-4), clip=0.25)


def nearest_codebooks() -> None:
    books = nn.Parameter(randn(8, 1024, 64))
    enc, dec = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).to(DEVICE), nn.Linear(512, 512).to(DEVICE)

    def loss() -> torch.Tensor:
        x = randn(8192, 512)
        z = enc(x).view(8192, 8, 64)
        far = torch.cdist(z.transpose(0, 1), books)
        near = far.topk(2, dim=-1, largest=False).indices[..., 0]
        q = torch.gather(books, 1, near[..., None].expand(-1, -1, 64)).transpose(0, 1)
        return F.mse_loss(dec((z + (q - z).detach()).reshape(8192, 512)), x) + F.mse_loss(q, z.detach())

    train(loss, torch.optim.AdamW([books, *enc.parameters(), *dec.parameters()], lr=1e-3))


def followed_teacher() -> None:
    import copy

    student = nn.Sequential(conv_norm(3, 64, 3, 2, act=nn.GELU), conv_norm(64, 128, 3, 2, act=nn.GELU), conv_norm(128, 256, 3, 2, act=nn.GELU), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 4096)).to(DEVICE, memory_format=torch.channels_last)
    teacher = copy.deepcopy(student).eval().requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    center = torch.zeros(1, 4096, device=DEVICE)
    for _ in range(3):
        views = [randn(48, 3, size, size).to(memory_format=torch.channels_last) for size in (128, 128, 64, 64)]
        with torch.autocast("cuda", torch.bfloat16):
            with torch.no_grad():
                wanted = [((teacher(v) - center) / 0.04).softmax(-1) for v in views[:2]]
            told = [(student(v) / 0.1).log_softmax(-1) for v in views]
            loss = sum(-(w * t).sum(-1).mean() for i, w in enumerate(wanted) for j, t in enumerate(told) if i != j)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            center.mul_(0.9).add_(torch.cat(wanted).mean(0, keepdim=True), alpha=0.1)
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.01)


WORKLOADS = (
    roberta_labels, marian_summaries, phi_prefill_decode, olmo_lengths, beit_fp32, resnet_hf_last, regnet_fp32, hubert_ctc, mixer_bf16, shuffle_fp32, segment_atrous, codec_1d, pix2pix, two_tower_sparse, message_passing_max, kernel_regression,
    spectral_conv_1d, gru_forecaster, decision_sequence, nearest_codebooks, followed_teacher,
)  # fmt: skip
