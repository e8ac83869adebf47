"""Images: convolutional nets of several kinds, diffusion, GANs, segmentation, volumes, video."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sweep.common import DEVICE, conv_norm, ids, randn, train


class Inverted(nn.Module):
    """EfficientNet's block: widen, depthwise, squeeze and excite, narrow."""

    def __init__(self, cin: int, cout: int, kernel: int, stride: int, expand: int = 6) -> None:
        super().__init__()
        mid = cin * expand
        self.widen, self.deep = conv_norm(cin, mid, 1, act=nn.SiLU), conv_norm(mid, mid, kernel, stride, groups=mid, act=nn.SiLU)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(mid, cin // 4, 1), nn.SiLU(inplace=True), nn.Conv2d(cin // 4, mid, 1), nn.Sigmoid())
        self.narrow = nn.Sequential(nn.Conv2d(mid, cout, 1, bias=False), nn.BatchNorm2d(cout))
        self.same = cin == cout and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.deep(self.widen(x))
        y = self.narrow(y * self.squeeze(y))
        return x + y if self.same else y


def _efficient() -> nn.Sequential:
    rows = ((16, 24, 3, 2), (24, 24, 3, 1), (24, 40, 5, 2), (40, 40, 5, 1), (40, 80, 3, 2), (80, 80, 3, 1), (80, 112, 5, 1), (112, 192, 5, 2), (192, 192, 5, 1))
    blocks = [Inverted(16, 16, 3, 1, 1), *(Inverted(*row) for row in rows)]
    return nn.Sequential(conv_norm(3, 16, 3, 2, act=nn.SiLU), *blocks, conv_norm(192, 768, 1, act=nn.SiLU), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(768, 1000)).to(DEVICE)


def efficient_fp32() -> None:
    net = _efficient()
    train(lambda: F.cross_entropy(net(randn(32, 3, 224, 224)), ids(1000, 32)), torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-5))


def efficient_last_bf16() -> None:
    net = _efficient().to(memory_format=torch.channels_last)
    train(lambda: F.cross_entropy(net(randn(64, 3, 192, 192).to(memory_format=torch.channels_last)), ids(1000, 64)), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), autocast=torch.bfloat16)


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down, self.scale = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


def convnext_fp32() -> None:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 4, 4), nn.GroupNorm(1, 64)]
    for i, count in enumerate((2, 2, 4)):
        width = 64 << i
        layers += ([nn.GroupNorm(1, width // 2), nn.Conv2d(width // 2, width, 2, 2)] if i else []) + [ConvNextBlock(width) for _ in range(count)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000)).to(DEVICE)
    train(lambda: F.cross_entropy(net(randn(32, 3, 224, 224)), ids(1000, 32)), torch.optim.AdamW(net.parameters(), lr=1e-3))


class Resnet(nn.Module):
    """Diffusion's block: group norms, SiLU, a shift by time."""

    def __init__(self, cin: int, cout: int, time: int) -> None:
        super().__init__()
        self.a, self.b, self.time = nn.Conv2d(cin, cout, 3, padding=1), nn.Conv2d(cout, cout, 3, padding=1), nn.Linear(time, cout)
        self.na, self.nb = nn.GroupNorm(16, cin), nn.GroupNorm(16, cout)
        self.short = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        y = self.a(F.silu(self.na(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.short(x) + self.b(F.silu(self.nb(y)))


class Attend(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(16, width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, 4, c // 4, h * w).transpose(-1, -2).unbind(1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(b, c, h, w))


class Diffusion(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        time, self.half = 4 * width, width // 2
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Sequential(nn.GroupNorm(16, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))
        self.down = nn.ModuleList([Resnet(width, width, time), Resnet(width, 2 * width, time), Resnet(2 * width, 4 * width, time)])
        self.shrink = nn.ModuleList([nn.Conv2d(width << i, width << i, 3, 2, 1) for i in range(2)])
        self.middle = nn.ModuleList([Resnet(4 * width, 4 * width, time), Attend(4 * width), Resnet(4 * width, 4 * width, time)])
        self.up = nn.ModuleList([Resnet(8 * width, 2 * width, time), Resnet(4 * width, width, time), Resnet(2 * width, width, time)])
        self.grow = nn.ModuleList([nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)])

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angle = t[:, None] * torch.exp(-torch.arange(self.half, device=t.device) / 8)
        t = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        x, kept = self.first(x), []
        for i, block in enumerate(self.down):
            x = block(x, t)
            kept.append(x)
            x = self.shrink[i](x) if i < 2 else x
        a, b, c = self.middle
        x = c(b(a(x, t)), t)
        for i, block in enumerate(self.up):
            x = block(torch.cat([x, kept.pop()], 1), t)
            x = self.grow[i](F.interpolate(x, scale_factor=2.0)) if i < 2 else x
        return self.last(x)


def _denoise(net: nn.Module, batch: int, size: int, last: bool) -> Any:
    def loss() -> torch.Tensor:
        x, noise, t = randn(batch, 3, size, size), randn(batch, 3, size, size), torch.rand(batch, device=DEVICE)
        x = (1 - t).sqrt()[:, None, None, None] * x + t.sqrt()[:, None, None, None] * noise
        return F.mse_loss(net(x.to(memory_format=torch.channels_last) if last else x, t * 1000).float(), noise)

    return loss


def diffusion_fp32_ema() -> None:
    net = Diffusion().to(DEVICE)
    follower = copy.deepcopy(net).requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for _ in range(3):
        train(_denoise(net, 16, 64, last=False), optimizer, steps=1, clip=1.0)
        with torch.no_grad():
            torch._foreach_lerp_(list(follower.parameters()), list(net.parameters()), 0.001)


def diffusion_last_fp16() -> None:
    net = Diffusion(96).to(DEVICE, memory_format=torch.channels_last)
    train(_denoise(net, 16, 64, last=True), torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True), autocast=torch.float16, scaled=True)


def dense_fp32() -> None:
    class Dense(nn.Module):
        def __init__(self, cin: int, grow: int = 32) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.BatchNorm2d(cin), nn.ReLU(inplace=True), nn.Conv2d(cin, 4 * grow, 1, bias=False), nn.BatchNorm2d(4 * grow), nn.ReLU(inplace=True), nn.Conv2d(4 * grow, grow, 3, padding=1, bias=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, self.body(x)], 1)

    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for count in (4, 6, 8):
        layers += [Dense(width + 32 * i) for i in range(count)]
        width += 32 * count
        layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
        width //= 2
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100)).to(DEVICE)
    train(lambda: F.cross_entropy(net(randn(24, 3, 224, 224)), ids(100, 24)), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True))


def vgg_fp32() -> None:
    layers: list[nn.Module] = []
    cin = 3
    for width, count in ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)):
        for _ in range(count):
            layers += [nn.Conv2d(cin, width, 3, padding=1), nn.ReLU(inplace=True)]
            cin = width
        layers.append(nn.MaxPool2d(2, 2))
    head = [nn.AdaptiveAvgPool2d((7, 7)), nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
    net = nn.Sequential(*layers, *head).to(DEVICE)
    train(lambda: F.cross_entropy(net(randn(32, 3, 224, 224)), ids(1000, 32)), torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4))


def _gan(width: int) -> tuple[nn.Module, nn.Module]:
    make: list[nn.Module] = []
    for cin, cout, stride, padding in ((128, 8 * width, 1, 0), (8 * width, 4 * width, 2, 1), (4 * width, 2 * width, 2, 1), (2 * width, width, 2, 1)):
        make += [nn.ConvTranspose2d(cin, cout, 4, stride, padding, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True)]
    judge: list[nn.Module] = []
    for cin, cout in ((3, width), (width, 2 * width), (2 * width, 4 * width), (4 * width, 8 * width)):
        judge += [nn.Conv2d(cin, cout, 4, 2, 1, bias=False), nn.InstanceNorm2d(cout, affine=True), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*make, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh()).to(DEVICE), nn.Sequential(*judge, nn.Conv2d(8 * width, 1, 4)).to(DEVICE)


def gan_fp32() -> None:
    make, judge = _gan(64)
    first, second = torch.optim.Adam(make.parameters(), lr=2e-4, betas=(0.5, 0.999)), torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for _ in range(3):
        real, made = randn(64, 3, 64, 64), make(randn(64, 128, 1, 1))
        judge.zero_grad()
        told, seen = judge(real).flatten(), judge(made.detach()).flatten()
        (F.binary_cross_entropy_with_logits(told, torch.ones_like(told)) + F.binary_cross_entropy_with_logits(seen, torch.zeros_like(seen))).backward()
        second.step()
        make.zero_grad()
        again = judge(made).flatten()
        F.binary_cross_entropy_with_logits(again, torch.ones_like(again)).backward()
        first.step()


def gan_penalty() -> None:
    make, judge = _gan(32)
    optimizer = torch.optim.Adam(judge.parameters(), lr=1e-4)

    def loss() -> torch.Tensor:
        real = randn(48, 3, 64, 64)
        with torch.no_grad():
            made = make(randn(48, 128, 1, 1))
        part = torch.rand(48, 1, 1, 1, device=DEVICE)
        mixed = (part * real + (1 - part) * made).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        return judge(made).mean() - judge(real).mean() + 10 * ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()

    train(loss, optimizer)


def volumes_fp32() -> None:
    def double(cin: int, cout: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv3d(cin, cout, 3, padding=1), nn.InstanceNorm3d(cout, affine=True), nn.LeakyReLU(inplace=True), nn.Conv3d(cout, cout, 3, padding=1), nn.InstanceNorm3d(cout, affine=True), nn.LeakyReLU(inplace=True))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d, self.e = double(1, 16), double(16, 32), double(32, 64), double(96, 32), double(48, 16)
            self.u, self.v, self.out = nn.ConvTranspose3d(64, 64, 2, 2), nn.ConvTranspose3d(32, 32, 2, 2), nn.Conv3d(16, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.a(x)
            b = self.b(F.max_pool3d(a, 2))
            d = self.d(torch.cat([self.u(self.c(F.max_pool3d(b, 2))), b], 1))
            return self.out(self.e(torch.cat([self.v(d), a], 1)))

    net = Net().to(DEVICE)

    def loss() -> torch.Tensor:
        y = ids(4, 2, 64, 64, 64)
        made = net(randn(2, 1, 64, 64, 64))
        part, whole = made.softmax(1), F.one_hot(y, 4).permute(0, 4, 1, 2, 3).float()
        return F.cross_entropy(made, y) + 1 - (2 * (part * whole).sum((2, 3, 4)) / (part.sum((2, 3, 4)) + whole.sum((2, 3, 4)) + 1e-5)).mean()

    train(loss, torch.optim.Adam(net.parameters(), lr=1e-3))


def video_bf16() -> None:
    def block(cin: int, cout: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv3d(cin, cout, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False), nn.BatchNorm3d(cout), nn.ReLU(inplace=True), nn.Conv3d(cout, cout, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False), nn.BatchNorm3d(cout), nn.ReLU(inplace=True)
        )

    net = nn.Sequential(block(3, 48, 2), block(48, 96, 2), block(96, 192, 2), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(192, 400)).to(DEVICE)
    train(lambda: F.cross_entropy(net(randn(8, 3, 16, 112, 112)), ids(400, 8)), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), autocast=torch.bfloat16)


def upscaling_last() -> None:
    body = [m for _ in range(6) for m in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(inplace=True))]
    net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *body, nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(64, 3, 3, padding=1)).to(DEVICE, memory_format=torch.channels_last)
    train(lambda: F.l1_loss(net(randn(16, 3, 96, 96).to(memory_format=torch.channels_last)), torch.rand(16, 3, 192, 192, device=DEVICE)), torch.optim.Adam(net.parameters(), lr=1e-4))


def quantised_codes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 4, 2, 1), nn.ReLU(), nn.Conv2d(128, 64, 1))
            self.codes = nn.Embedding(512, 64)
            self.dec = nn.Sequential(nn.ConvTranspose2d(64, 128, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(128, 3, 4, 2, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.enc(x).permute(0, 2, 3, 1)
            near = torch.cdist(z.reshape(-1, 64), self.codes.weight).argmin(1)
            q = self.codes(near).view(z.shape)
            made = self.dec((z + (q - z).detach()).permute(0, 3, 1, 2))
            return F.mse_loss(made, x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)

    net = Net().to(DEVICE)
    train(lambda: net(randn(32, 3, 128, 128)), torch.optim.Adam(net.parameters(), lr=1e-3))


def spatial_warp() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(conv_norm(3, 32, 5, 2), conv_norm(32, 64, 3, 2))
            self.flow = nn.Sequential(nn.Conv2d(64 * 2 + 81, 96, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(96, 2, 3, padding=1))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            f, g = self.f(a), self.f(b)
            n, c, h, w = f.shape
            near = (F.unfold(g, 9, padding=4).view(n, c, 81, h, w) * f[:, :, None]).mean(1)
            flow = F.interpolate(self.flow(torch.cat([f, g, near], 1)), size=a.shape[-2:], mode="bilinear", align_corners=True)
            ys, xs = torch.meshgrid(torch.linspace(-1, 1, a.shape[2], device=a.device), torch.linspace(-1, 1, a.shape[3], device=a.device), indexing="ij")
            warped = F.grid_sample(b, torch.stack([xs, ys], -1) + flow.permute(0, 2, 3, 1), align_corners=True, padding_mode="border")
            return (warped - a).abs().mean() + 0.1 * (flow[..., 1:] - flow[..., :-1]).abs().mean()

    net = Net().to(DEVICE)
    train(lambda: net(randn(6, 3, 192, 192), randn(6, 3, 192, 192)), torch.optim.AdamW(net.parameters(), lr=1e-4))


def detector() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([nn.Sequential(conv_norm(3, 64, 7, 4)), conv_norm(64, 128, 3, 2), conv_norm(128, 256, 3, 2), conv_norm(256, 512, 3, 2)])
            self.sides = nn.ModuleList([nn.Conv2d(c, 128, 1) for c in (128, 256, 512)])
            self.heads = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1), nn.GroupNorm(32, 128), nn.ReLU())
            self.label, self.box = nn.Conv2d(128, 9 * 20, 3, padding=1), nn.Conv2d(128, 9 * 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen = []
            for stage in self.stages:
                x = stage(x)
                seen.append(x)
            tops = [side(f) for side, f in zip(self.sides, seen[1:], strict=True)]
            for i in (1, 0):
                tops[i] = tops[i] + F.interpolate(tops[i + 1], size=tops[i].shape[-2:], mode="nearest")
            made = [self.heads(t) for t in tops]
            return torch.cat([self.label(t).permute(0, 2, 3, 1).reshape(t.shape[0], -1, 20) for t in made], 1), torch.cat([self.box(t).permute(0, 2, 3, 1).reshape(t.shape[0], -1, 4) for t in made], 1)

    net = Net().to(DEVICE)

    def loss() -> torch.Tensor:
        labels, boxes = net(randn(8, 3, 320, 320))
        wanted = torch.zeros_like(labels)
        wanted[:, :40, 3] = 1.0
        p = labels.sigmoid()
        plain = F.binary_cross_entropy_with_logits(labels, wanted, reduction="none")
        focal = (plain * (1 - (p * wanted + (1 - p) * (1 - wanted))) ** 2).sum() / 40
        hit = torch.zeros(boxes.shape[:2], dtype=torch.bool, device=DEVICE)
        hit[:, :40] = True
        return focal + F.smooth_l1_loss(boxes[hit], torch.rand(8 * 40, 4, device=DEVICE))

    train(loss, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4))


def classifier_eval_half() -> None:
    net = nn.Sequential(conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), *(conv_norm(64 << i, 64 << (i + 1), 3, 2) for i in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)).to(DEVICE).half().eval()
    with torch.inference_mode():
        for batch in (64, 64, 48):
            net(randn(batch, 3, 224, 224, dtype=torch.float16)).softmax(-1).topk(5)


WORKLOADS = (
    efficient_fp32, efficient_last_bf16, convnext_fp32, diffusion_fp32_ema, diffusion_last_fp16, dense_fp32, vgg_fp32, gan_fp32, gan_penalty, volumes_fp32, video_bf16, upscaling_last, quantised_codes, spatial_warp, detector, classifier_eval_half
)  # fmt: skip
