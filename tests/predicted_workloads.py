"""Ten workloads that no rule of the predictor was made with: predicted and committed first, measured on an H200 afterwards.

``WORKLOADS``: name -> (function without arguments, options); ``env`` in the options is set before the process starts. The last is of a kind
that can't be predicted (cuDNN's benchmark mode): a range is the answer.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

DEVICE = "cuda"


def grouped_residual_net() -> None:
    """ResNeXt-like: grouped convolutions, channels last, bf16 autocast, SGD with Nesterov momentum, label smoothing."""

    class Block(nn.Module):
        def __init__(self, cin: int, cout: int, stride: int) -> None:
            super().__init__()
            mid = cout // 2
            self.body = nn.Sequential(
                nn.Conv2d(cin, mid, 1, bias=False), nn.BatchNorm2d(mid), nn.ReLU(inplace=True),
                nn.Conv2d(mid, mid, 3, stride, 1, groups=32, bias=False), nn.BatchNorm2d(mid), nn.ReLU(inplace=True), nn.Conv2d(mid, cout, 1, bias=False), nn.BatchNorm2d(cout),
            )  # fmt: skip
            self.short = nn.Identity() if cin == cout and stride == 1 else nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.body(x) + self.short(x))

    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for stage, count in enumerate((2, 3, 4, 2)):
        for i in range(count):
            layers.append(Block(width, 256 << stage, 2 if i == 0 and stage else 1))
            width = 256 << stage
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    for _ in range(3):
        x = torch.randn(48, 3, 192, 192, device=DEVICE).to(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(net(x), torch.randint(0, 1000, (48,), device=DEVICE), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def segmentation_net() -> None:
    """A U-shaped net for segmentation in fp32, plain layout: batch norm, bilinear upsampling, concatenations, a loss for each pixel, AdamW."""

    def double(cin: int, cout: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True), nn.Conv2d(cout, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (48, 96, 192, 384)
            self.down = nn.ModuleList(double(3 if i == 0 else widths[i - 1], w) for i, w in enumerate(widths))
            self.up = nn.ModuleList(double(widths[i + 1] + widths[i], widths[i]) for i in reversed(range(3)))
            self.head = nn.Conv2d(48, 21, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for i, layer in enumerate(self.down):
                x = layer(x if i == 0 else F.max_pool2d(x, 2))
                kept.append(x)
            kept.pop()
            for layer in self.up:
                skip = kept.pop()
                x = layer(torch.cat([F.interpolate(x, size=skip.shape[-2:], mode="bilinear"), skip], 1))
            return self.head(x)

    net = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(3):
        loss = F.cross_entropy(net(torch.randn(6, 3, 256, 320, device=DEVICE)), torch.randint(0, 21, (6, 256, 320), device=DEVICE), ignore_index=255)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def token_classifier() -> None:
    """RoBERTa for token classification: padded batches, fp16 autocast with a gradient scaler, clipping, weight decay groups."""
    from transformers import RobertaConfig, RobertaForTokenClassification

    net = RobertaForTokenClassification(RobertaConfig(num_hidden_layers=8, num_labels=17, max_position_embeddings=514, vocab_size=50265, type_vocab_size=1)).to(DEVICE)
    plain = [p for n, p in net.named_parameters() if "bias" in n or "LayerNorm" in n]
    decayed = [p for n, p in net.named_parameters() if not ("bias" in n or "LayerNorm" in n)]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=2e-5)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(3):
        ids = torch.randint(5, 50265, (24, 320), device=DEVICE)
        lengths = torch.linspace(100, 320, 24).long().to(DEVICE) - step
        mask = (torch.arange(320, device=DEVICE)[None] < lengths[:, None]).long()
        with torch.autocast("cuda", torch.float16):
            loss = net(input_ids=ids.masked_fill(mask == 0, 1), attention_mask=mask, labels=torch.randint(0, 17, (24, 320), device=DEVICE)).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def contrastive_towers() -> None:
    """CLIP: an image and a text encoder and a loss over all pairs, bf16 autocast, fused AdamW."""
    from transformers import CLIPConfig, CLIPModel

    net = CLIPModel(CLIPConfig(text_config={"num_hidden_layers": 8}, vision_config={"num_hidden_layers": 8, "patch_size": 16})).to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    for _ in range(3):
        pixels, ids = torch.randn(96, 3, 224, 224, device=DEVICE), torch.randint(0, 49000, (96, 77), device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids), return_loss=True).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def parallel_decoder() -> None:
    """GPT-NeoX, pure bf16: rotary halves, parallel residuals, accumulation over three micro-batches, every block recomputed, foreach AdamW."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        net = GPTNeoXForCausalLM(GPTNeoXConfig(hidden_size=1536, num_hidden_layers=16, num_attention_heads=12, intermediate_size=6144, vocab_size=50432))
    torch.set_default_dtype(torch.float32)
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    net.train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for _ in range(2):
        for _ in range(3):
            ids = torch.randint(0, 50432, (3, 1536), device=DEVICE)
            (net(input_ids=ids, labels=ids, use_cache=False).loss / 3).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def masked_autoencoder() -> None:
    """An autoencoder over image patches of which three quarters are hidden: sorting of random numbers, gathers, two transformers, fp32, AdamW."""

    def encoder(width: int, heads: int, depth: int) -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True), depth, enable_nested_tensor=False)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.place = nn.Conv2d(3, 384, 16, 16), nn.Parameter(torch.zeros(1, 196, 384))
            self.encode, self.decode = encoder(384, 6, 6), encoder(192, 3, 3)
            self.shrink, self.hidden, self.out = nn.Linear(384, 192), nn.Parameter(torch.zeros(1, 1, 192)), nn.Linear(192, 768)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            x = self.patch(image).flatten(2).transpose(1, 2) + self.place
            batch, count, width = x.shape
            order = torch.rand(batch, count, device=x.device).argsort(1)
            back, seen = order.argsort(1), order[:, : count // 4]
            x = self.shrink(self.encode(torch.gather(x, 1, seen[..., None].expand(-1, -1, width))))
            x = torch.cat([x, self.hidden.expand(batch, count - x.shape[1], -1)], 1)
            x = self.out(self.decode(torch.gather(x, 1, back[..., None].expand(-1, -1, x.shape[-1]))))
            target = image.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 4, 5, 1).reshape(batch, count, 768)
            return ((x - target) ** 2).mean()

    net = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.95))
    for _ in range(3):
        net(torch.randn(64, 3, 224, 224, device=DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()


def speech_recognizer() -> None:
    """Convolutions over time, three bidirectional LSTM layers and a CTC-like frame loss, RMSprop."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = nn.Sequential(nn.Conv1d(80, 256, 5, 2, 2), nn.BatchNorm1d(256), nn.GELU(), nn.Conv1d(256, 320, 5, 2, 2), nn.BatchNorm1d(320), nn.GELU())
            self.lstm, self.out = nn.LSTM(320, 320, 3, batch_first=True, bidirectional=True, dropout=0.2), nn.Linear(640, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.lstm(self.front(x).transpose(1, 2))[0])

    net = Net().to(DEVICE)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-4)
    for _ in range(3):
        logits = net(torch.randn(24, 80, 1200, device=DEVICE))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.randint(0, 1024, (24 * 300,), device=DEVICE))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()


def sampled_generation() -> None:
    """OPT in fp16: prefill and sampling with top-k and top-p, batch 6, a growing cache."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.set_default_dtype(torch.float16)
    with torch.device(DEVICE):
        net = OPTForCausalLM(OPTConfig(hidden_size=2048, num_hidden_layers=16, ffn_dim=8192, num_attention_heads=32, word_embed_proj_dim=2048)).eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(5, 50000, (6, 900), device=DEVICE)
    with torch.no_grad():
        net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=True, top_k=40, top_p=0.9, pad_token_id=1)


def diffusion_transformer() -> None:
    """A transformer over latent patches with adaptive norms, bf16 autocast, a second model that follows the first, expandable segments."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b = nn.LayerNorm(width, elementwise_affine=False), nn.LayerNorm(width, elementwise_affine=False)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp, self.shape = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)), nn.Linear(width, 6 * width)

        def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            s1, g1, o1, s2, g2, o2 = self.shape(F.silu(c))[:, None].chunk(6, -1)
            batch, count, width = x.shape
            q, k, v = self.qkv(self.a(x) * (1 + g1) + s1).view(batch, count, 3, 12, width // 12).permute(2, 0, 3, 1, 4)
            x = x + o1 * self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, count, width))
            return x + o2 * self.mlp(self.b(x) * (1 + g2) + s2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.time, self.label = nn.Conv2d(4, 768, 2, 2), nn.Sequential(nn.Linear(256, 768), nn.SiLU(), nn.Linear(768, 768)), nn.Embedding(1001, 768)
            self.blocks, self.out = nn.ModuleList(Block(768) for _ in range(10)), nn.Linear(768, 16)

        def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            c = self.time(torch.cat([torch.cos(t[:, None] * torch.arange(128, device=t.device)), torch.sin(t[:, None] * torch.arange(128, device=t.device))], 1)) + self.label(y)
            x = self.patch(x).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = block(x, c)
            return F.fold(self.out(x).transpose(1, 2), (32, 32), 2, stride=2)

    net = Net().to(DEVICE)
    follower = copy.deepcopy(net).requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for _ in range(3):
        x, noise = torch.randn(2, 40, 4, 32, 32, device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            made = net(x + noise, torch.rand(40, device=DEVICE), torch.randint(0, 1001, (40,), device=DEVICE))
        F.mse_loss(made.float(), noise).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(follower.parameters(), net.parameters(), strict=True):
                mine.lerp_(theirs, 0.001)


def benchmarked_convolutions() -> None:
    """Convolutions with ``torch.backends.cudnn.benchmark``: a kind that can't be predicted."""
    torch.backends.cudnn.benchmark = True
    layers: list[nn.Module] = []
    for cin, cout in ((3, 64), (64, 64), (64, 128), (128, 128), (128, 256)):
        layers += [nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True)] + ([nn.MaxPool2d(2)] if cin == cout else [])
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        F.cross_entropy(net(torch.randn(16, 3, 160, 160, device=DEVICE)), torch.randint(0, 100, (16,), device=DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.backends.cudnn.benchmark = False


_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
WORKLOADS = {
    "grouped_residual_net": (grouped_residual_net, {}), "segmentation_net": (segmentation_net, {}), "token_classifier": (token_classifier, {}), "contrastive_towers": (contrastive_towers, {}),
    "parallel_decoder": (parallel_decoder, {}), "masked_autoencoder": (masked_autoencoder, {}), "speech_recognizer": (speech_recognizer, {}), "sampled_generation": (sampled_generation, {}),
    "diffusion_transformer": (diffusion_transformer, {"env": _EXPANDABLE}), "benchmarked_convolutions": (benchmarked_convolutions, {}),
}  # fmt: skip
