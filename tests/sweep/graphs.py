"""Graphs, recommenders, points, experts: embeddings, scattering, sorting and choosing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sweep.common import DEVICE, ids, randn, train


class Recommender(nn.Module):
    """DLRM: bags of categories, dense features, dot products of all pairs."""

    def __init__(self, sparse: bool, rows: int = 200_000, width: int = 64, tables: int = 8) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + (tables + 1) * tables // 2, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, dense: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(bag(places[i], offsets) for i, bag in enumerate(self.bags))], 1)
        dots = torch.bmm(rows, rows.transpose(1, 2))
        i, j = torch.tril_indices(rows.shape[1], rows.shape[1], -1, device=x.device)
        return self.top(torch.cat([x, dots[:, i, j]], 1)).squeeze(1)


def _recommend(net: Recommender):
    def loss() -> torch.Tensor:
        offsets = torch.arange(0, 4096 * 4, 4, device=DEVICE)
        return F.binary_cross_entropy_with_logits(net(randn(4096, 13), ids(200_000, 8, 4096 * 4), offsets), torch.rand(4096, device=DEVICE).round())

    return loss


def recommender_dense() -> None:
    net = Recommender(sparse=False).to(DEVICE)
    train(_recommend(net), torch.optim.Adagrad(net.parameters(), lr=0.01))


def recommender_sparse() -> None:
    net = Recommender(sparse=True).to(DEVICE)
    first, second = torch.optim.SparseAdam(list(net.bags.parameters()), lr=1e-3), torch.optim.Adam([*net.bottom.parameters(), *net.top.parameters()])
    loss = _recommend(net)
    for _ in range(3):
        loss().backward()
        first.step()
        second.step()
        net.zero_grad()


def skipgram_sparse_sgd() -> None:
    near, far = nn.Embedding(500_000, 128, sparse=True).to(DEVICE), nn.Embedding(500_000, 128, sparse=True).to(DEVICE)

    def loss() -> torch.Tensor:
        a, b, c = near(ids(500_000, 8192)), far(ids(500_000, 8192)), far(ids(500_000, 8192, 5))
        return -(F.logsigmoid((a * b).sum(1)) + F.logsigmoid(-(c @ a[:, :, None]).squeeze(2)).sum(1)).mean()

    train(loss, torch.optim.SGD([near.weight, far.weight], lr=0.1))


def graph_convolutions() -> None:
    nodes, edges = 40_000, 400_000
    source, target = ids(nodes, edges), ids(nodes, edges)
    degree = torch.zeros(nodes, device=DEVICE).index_add_(0, target, torch.ones(edges, device=DEVICE)).clamp(min=1)
    layers = nn.ModuleList([nn.Linear(128, 256), nn.Linear(256, 256), nn.Linear(256, 40)]).to(DEVICE)
    x, y = randn(nodes, 128), ids(40, nodes)
    known = torch.arange(nodes, device=DEVICE) % 3 == 0

    def loss() -> torch.Tensor:
        h = x
        for i, layer in enumerate(layers):
            h = layer(h)
            h = torch.zeros(nodes, h.shape[1], device=DEVICE).index_add(0, target, h[source]) / degree[:, None]
            h = F.dropout(F.relu(h), 0.5) if i < 2 else h
        return F.cross_entropy(h[known], y[known])

    train(loss, torch.optim.Adam(layers.parameters(), lr=0.01, weight_decay=5e-4))


def graph_attention() -> None:
    nodes, edges, heads, width = 20_000, 200_000, 4, 32
    source, target = ids(nodes, edges), ids(nodes, edges)
    first, out, a = nn.Linear(64, heads * width).to(DEVICE), nn.Linear(heads * width, 10).to(DEVICE), nn.Parameter(randn(2, heads, width) * 0.1)
    x, y = randn(nodes, 64), ids(10, nodes)

    def loss() -> torch.Tensor:
        h = first(x).view(nodes, heads, width)
        score = F.leaky_relu((h * a[0]).sum(-1)[source] + (h * a[1]).sum(-1)[target], 0.2)
        most = torch.full((nodes, heads), -1e9, device=DEVICE).scatter_reduce(0, target[:, None].expand(-1, heads), score.detach(), "amax")
        part = (score - most[target]).exp()
        whole = torch.zeros(nodes, heads, device=DEVICE).scatter_add(0, target[:, None].expand(-1, heads), part)
        message = h[source] * (part / (whole[target] + 1e-9))[..., None]
        return F.cross_entropy(out(F.elu(torch.zeros_like(h).index_add(0, target, message).flatten(1))), y)

    train(loss, torch.optim.Adam([*first.parameters(), *out.parameters(), a], lr=0.005))


def points_nearest() -> None:
    class Edges(nn.Module):
        def __init__(self, cin: int, cout: int) -> None:
            super().__init__()
            self.conv = nn.Sequential(nn.Conv2d(2 * cin, cout, 1, bias=False), nn.BatchNorm2d(cout), nn.LeakyReLU(0.2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, width, count = x.shape
            inner = -2 * x.transpose(2, 1) @ x
            square = (x**2).sum(1, keepdim=True)
            near = (-square - inner - square.transpose(2, 1)).topk(16, dim=-1).indices
            flat = (near + torch.arange(batch, device=x.device)[:, None, None] * count).view(-1)
            rows = x.transpose(2, 1).reshape(batch * count, width)
            around = rows[flat].view(batch, count, 16, width)
            middle = rows.view(batch, count, 1, width).expand(-1, -1, 16, -1)
            return self.conv(torch.cat([around - middle, middle], 3).permute(0, 3, 1, 2)).amax(-1)

    a, b, head = Edges(3, 64).to(DEVICE), Edges(64, 128).to(DEVICE), nn.Linear(128, 40).to(DEVICE)

    def loss() -> torch.Tensor:
        return F.cross_entropy(head(b(a(randn(8, 3, 1024))).amax(-1)), ids(40, 8))

    train(loss, torch.optim.SGD([*a.parameters(), *b.parameters(), *head.parameters()], lr=0.1, momentum=0.9))


def own_experts() -> None:
    class Experts(nn.Module):
        def __init__(self, width: int, count: int) -> None:
            super().__init__()
            self.gate = nn.Linear(width, count, bias=False)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.reshape(-1, x.shape[-1])
            weight, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
            out = torch.zeros_like(flat)
            for i, expert in enumerate(self.experts):
                row, rank = torch.where(chosen == i)
                out.index_add_(0, row, expert(flat[row]) * weight[row, rank, None])
            return out.view_as(x)

    net = nn.Sequential(nn.Embedding(10_000, 512), *(nn.Sequential(nn.LayerNorm(512), Experts(512, 8)) for _ in range(3)), nn.Linear(512, 10_000)).to(DEVICE)

    def loss() -> torch.Tensor:
        x = ids(10_000, 8, 512)
        return F.cross_entropy(net(x).flatten(0, 1), x.flatten())

    train(loss, torch.optim.AdamW(net.parameters(), lr=1e-4))


def hard_triplets() -> None:
    net = nn.Sequential(nn.Linear(2048, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 256)).to(DEVICE)

    def loss() -> torch.Tensor:
        x, y = F.normalize(net(randn(2048, 2048)), dim=-1), ids(64, 2048)
        far = torch.cdist(x, x)
        same = y[:, None] == y[None]
        hardest = far.masked_fill(~same, 0.0).max(1).values
        nearest = far.masked_fill(same, float("inf")).topk(4, dim=1, largest=False).values.mean(1)
        return F.relu(hardest - nearest + 0.2).mean()

    train(loss, torch.optim.Adamax(net.parameters(), lr=1e-3))


def two_views() -> None:
    net = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.GELU(), nn.Conv2d(64, 128, 3, 2, 1), nn.GELU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(2048, 128)).to(DEVICE)

    def loss() -> torch.Tensor:
        z = F.normalize(net(randn(1024, 3, 48, 48)), dim=1)
        close = (z @ z.t() / 0.1).masked_fill(torch.eye(1024, dtype=torch.bool, device=DEVICE), -1e9)
        return (close.logsumexp(1) - close.diagonal(512).repeat(2)).mean()

    train(loss, torch.optim.SGD(net.parameters(), lr=0.1), autocast=torch.bfloat16)


def choosing() -> None:
    x = randn(4096, 8192)
    for _ in range(2):
        best, place = x.topk(100, dim=-1)
        order = x[:256].sort(dim=-1, descending=True).indices
        marks = torch.unique(ids(1000, 1_000_000), return_counts=True)
        picked = torch.masked_select(x, torch.arange(8192, device=DEVICE) % 2 == 0)
        rows = torch.arange(2_000_000, device=DEVICE).remainder(7).eq(3).nonzero()
        kept = torch.cummax(x[:512], 1).values + x[:512].cumsum(1) + x[:512].cumprod(1)
        mid = x.median(dim=1).values, x[:100].kthvalue(10, dim=1).values, x[:64].quantile(0.9, dim=1), x.argsort(dim=0)[:10]
        where = torch.searchsorted(x[0].sort().values, x[1]), torch.bucketize(x, torch.linspace(-3, 3, 64, device=DEVICE)), torch.bincount(ids(1000, 500_000)), torch.histc(x, 100)
        del best, place, order, marks, picked, rows, kept, mid, where


def jagged_batch() -> None:
    net = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(DEVICE)

    def loss() -> torch.Tensor:
        ragged = torch.nested.nested_tensor([torch.randn(n, 256) for n in (100, 300, 512, 77)], layout=torch.jagged, device=DEVICE)
        return torch.nested.to_padded_tensor(net(ragged), 0.0).square().mean()

    train(loss, torch.optim.AdamW(net.parameters(), lr=1e-4), steps=2)


WORKLOADS = (recommender_dense, recommender_sparse, skipgram_sparse_sgd, graph_convolutions, graph_attention, points_nearest, own_experts, hard_triplets, two_views, choosing, jagged_batch)
