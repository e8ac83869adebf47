"""Ways of learning: checkpoints, accumulation, transforms of functions, double backward, quasi-Newton, reinforcement, own gradients."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from sweep.common import DEVICE, conv_norm, ids, randn, train


def checkpointed_convolutions() -> None:
    net = nn.Sequential(conv_norm(3, 64, 3), *(conv_norm(64, 64, 3) for _ in range(8)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(DEVICE)
    train(lambda: F.cross_entropy(checkpoint_sequential(net, 4, randn(16, 3, 128, 128).requires_grad_(), use_reentrant=True), ids(10, 16)), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))


def checkpointed_accumulation() -> None:
    layers = nn.ModuleList(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True) for _ in range(6)).to(DEVICE)
    head = nn.Linear(512, 1000).to(DEVICE)
    optimizer = torch.optim.AdamW([*layers.parameters(), *head.parameters()], lr=1e-4)
    for _ in range(2):
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                x = randn(8, 512, 512)
                for layer in layers:
                    x = checkpoint(layer, x, use_reentrant=False)
                loss = F.cross_entropy(head(x.mean(1)), ids(1000, 8))
            (loss / 3).backward()
        optimizer.step()
        optimizer.zero_grad()


def sample_gradients() -> None:
    from torch.func import functional_call, grad, vmap

    net = nn.Sequential(nn.Conv2d(1, 16, 5), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 144, 128), nn.Tanh(), nn.Linear(128, 10)).to(DEVICE)
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(w: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(net, w, (x[None],)), y[None])

    for _ in range(3):
        each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, randn(256, 1, 28, 28), ids(10, 256))
        size = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        part = (1.0 / size.clamp(min=1.0))
        weights = {name: w - 0.1 * torch.einsum("n,n...->...", part, each[name]) / 256 for name, w in weights.items()}


def inner_steps() -> None:
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).to(DEVICE)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def loss() -> torch.Tensor:
        whole = torch.zeros((), device=DEVICE)
        for _ in range(4):
            fast = dict(net.named_parameters())
            for _ in range(3):
                told = F.cross_entropy(torch.func.functional_call(net, fast, (randn(256, 784),)), ids(10, 256))
                grads = torch.autograd.grad(told, list(fast.values()), create_graph=True)
                fast = {name: w - 0.01 * g for (name, w), g in zip(fast.items(), grads, strict=True)}
            whole = whole + F.cross_entropy(torch.func.functional_call(net, fast, (randn(256, 784),)), ids(10, 256))
        return whole

    train(loss, optimizer)


def quasi_newton() -> None:
    net = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)).to(DEVICE)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, history_size=4)
    x, y = randn(4096, 64), randn(4096, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def physics_informed() -> None:
    net = nn.Sequential(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)).to(DEVICE)

    def loss() -> torch.Tensor:
        x = torch.rand(20_000, 2, device=DEVICE, requires_grad=True)
        u = net(x)
        (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad(g[:, 0].sum(), x, create_graph=True)
        return (g[:, 1] + u[:, 0] * g[:, 0] - 0.01 * gg[:, 0]).square().mean()

    train(loss, torch.optim.Adam(net.parameters(), lr=1e-3))


def policy_rollouts() -> None:
    actor, critic = (nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, n)).to(DEVICE) for n in (18, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-4)
    for _ in range(2):
        with torch.no_grad():
            seen, done, logs = [], [], []
            for _ in range(32):
                x = randn(256, 64)
                choice = torch.distributions.Categorical(logits=actor(x))
                a = choice.sample()
                seen.append(x), done.append(a), logs.append(choice.log_prob(a))
        x, a, old, gain = torch.cat(seen), torch.cat(done), torch.cat(logs), randn(8192)
        for rows in torch.randperm(8192, device=DEVICE).split(2048):
            choice = torch.distributions.Categorical(logits=actor(x[rows]))
            ratio = (choice.log_prob(a[rows]) - old[rows]).exp()
            loss = -torch.min(ratio * gain[rows], ratio.clamp(0.8, 1.2) * gain[rows]).mean() + F.mse_loss(critic(x[rows]).squeeze(1), gain[rows]) - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()


class Swish(torch.autograd.Function):
    """x * sigmoid(x), computed again in backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


class Int8Linear(nn.Module):
    """Weights in eight bits, widened for each product."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 127, (outer, inner), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(outer, 1) / 127)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def adapters_on_int8() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(1024), Int8Linear(1024, 4096), Int8Linear(4096, 1024)
            self.a, self.b = nn.Linear(1024, 16, bias=False), nn.Linear(16, 4096, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            return x + self.down(Swish.apply(self.up(h) + self.b(self.a(h))))

    net = nn.Sequential(*(Block() for _ in range(6))).to(DEVICE)
    train(lambda: net(randn(8, 256, 1024)).square().mean(), torch.optim.AdamW([p for n, p in net.named_parameters() if "norm" not in n], lr=1e-4), autocast=torch.bfloat16)


def radiance_field() -> None:
    net = nn.Sequential(nn.Linear(63, 256), nn.ReLU(), *(m for _ in range(4) for m in (nn.Linear(256, 256), nn.ReLU())), nn.Linear(256, 4)).to(DEVICE)

    def render(t: torch.Tensor, start: torch.Tensor, way: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = start[:, None] + t[..., None] * way[:, None]
        waves = (2.0 ** torch.arange(10, device=DEVICE))[:, None] * p[..., None, :]
        out = net(torch.cat([p, waves.sin().flatten(-2), waves.cos().flatten(-2)], -1))
        alpha = 1 - torch.exp(-F.relu(out[..., 3]) * 0.01)
        weight = alpha * torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return (weight[..., None] * out[..., :3].sigmoid()).sum(1), weight

    def loss() -> torch.Tensor:
        start, way = randn(1024, 3), randn(1024, 3)
        coarse = torch.linspace(0, 1, 64, device=DEVICE).expand(1024, 64)
        first, weight = render(coarse, start, way)
        steps = torch.cumsum(weight.detach() + 1e-5, 1)
        places = torch.searchsorted((steps / steps[:, -1:]).contiguous(), torch.rand(1024, 64, device=DEVICE)).clamp(max=63)
        fine = torch.cat([coarse, coarse.gather(1, places)], 1).sort(1).values
        second, _ = render(fine, start, way)
        target = torch.rand(1024, 3, device=DEVICE)
        return F.mse_loss(first, target) + F.mse_loss(second, target)

    train(loss, torch.optim.Adam(net.parameters(), lr=5e-4))


def teacher_student() -> None:
    def make(width: int, depth: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(5000, width), nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True), depth), nn.Linear(width, 5000)).to(DEVICE)

    teacher, student = make(512, 6).eval(), make(256, 3)

    def loss() -> torch.Tensor:
        x = ids(5000, 16, 128)
        with torch.no_grad():
            wanted = (teacher(x) / 2).softmax(-1)
        logits = student(x)
        return F.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean") * 4 + F.cross_entropy(logits.flatten(0, 1), x.flatten())

    train(loss, torch.optim.AdamW(student.parameters(), lr=1e-4))


def translator_transformer() -> None:
    net, words, out = nn.Transformer(512, 8, 3, 3, 2048, batch_first=True).to(DEVICE), nn.Embedding(16_000, 512).to(DEVICE), nn.Linear(512, 16_000).to(DEVICE)

    def loss() -> torch.Tensor:
        x, y = ids(16_000, 16, 128), ids(16_000, 16, 96)
        pad = torch.arange(128, device=DEVICE)[None] >= torch.linspace(60, 128, 16, device=DEVICE)[:, None]
        made = net(words(x), words(y), tgt_mask=nn.Transformer.generate_square_subsequent_mask(96, device=DEVICE), src_key_padding_mask=pad, memory_key_padding_mask=pad, tgt_is_causal=True)
        return F.cross_entropy(out(made).flatten(0, 1), y.flatten(), label_smoothing=0.1)

    train(loss, torch.optim.Adam([*net.parameters(), *words.parameters(), *out.parameters()], lr=1e-4, betas=(0.9, 0.98)))


def momentum_contrast() -> None:
    net = nn.Sequential(conv_norm(3, 64, 3, 2), conv_norm(64, 128, 3, 2), conv_norm(128, 256, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 128)).to(DEVICE)
    other = copy.deepcopy(net).requires_grad_(requires_grad=False)
    queue = F.normalize(randn(128, 16384), dim=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    for step in range(3):
        q = F.normalize(net(randn(128, 3, 96, 96)), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
                mine.mul_(0.999).add_(theirs, alpha=0.001)
            k = F.normalize(other(randn(128, 3, 96, 96)[torch.randperm(128, device=DEVICE)]), dim=1)
        logits = torch.cat([torch.einsum("nc,nc->n", q, k)[:, None], torch.einsum("nc,ck->nk", q, queue.clone().detach())], 1) / 0.07
        F.cross_entropy(logits, torch.zeros(128, dtype=torch.long, device=DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()
        queue[:, step * 128 : (step + 1) * 128] = k.T


WORKLOADS = (
    checkpointed_convolutions, checkpointed_accumulation, sample_gradients, inner_steps, quasi_newton, physics_informed, policy_rollouts, adapters_on_int8, radiance_field, teacher_student, translator_transformer, momentum_contrast
)  # fmt: skip
