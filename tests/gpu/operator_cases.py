"""Operators whose memory on a GPU a prediction has to know: each case builds its inputs and calls them.

``cases(torch)`` yields ``(section, name, build)``; ``build(device)`` returns ``(inputs, fn)``. Floating inputs that require grad get a
backward. The same cases are recorded on a GPU (record_operators.py) and run under fake tensors.
"""

from __future__ import annotations

import random


def convolutions(torch, count=420):
    """A sample of the shapes of convolutional nets: the seed fixes it."""
    nn = torch.nn.functional
    pick = random.Random(6)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    nets = []
    for dtype in ("fp32", "bf16"):
        for last in (False, True):
            nets += [
                (dtype, last, 16, 3, 64, 224, 3, 1, 1, 1), (dtype, last, 16, 64, 64, 224, 3, 1, 1, 1), (dtype, last, 16, 64, 128, 112, 3, 1, 1, 1), (dtype, last, 16, 128, 256, 56, 3, 1, 1, 1),
                (dtype, last, 16, 512, 512, 14, 3, 1, 1, 1), (dtype, last, 32, 3, 64, 224, 7, 2, 3, 1), (dtype, last, 32, 64, 64, 56, 1, 1, 0, 1), (dtype, last, 32, 256, 64, 56, 1, 1, 0, 1),
                (dtype, last, 32, 256, 512, 56, 1, 2, 0, 1), (dtype, last, 16, 128, 32, 56, 3, 1, 1, 1), (dtype, last, 16, 160, 128, 28, 1, 1, 0, 1), (dtype, last, 64, 3, 64, 32, 4, 2, 1, 1),
                (dtype, last, 64, 64, 128, 16, 4, 2, 1, 1), (dtype, last, 64, 256, 1, 4, 4, 1, 0, 1), (dtype, last, 16, 3, 768, 224, 16, 16, 0, 1), (dtype, last, 8, 96, 96, 56, 7, 1, 3, 96),
                (dtype, last, 16, 144, 144, 56, 3, 1, 1, 144), (dtype, last, 16, 32, 32, 112, 3, 1, 1, 32), (dtype, last, 32, 1, 32, 28, 3, 1, 1, 1), (dtype, last, 32, 32, 64, 26, 3, 1, 0, 1),
            ]  # fmt: skip
    while len(nets) < count:
        kernel = pick.choice((1, 1, 3, 3, 3, 3, 5, 7))
        groups = pick.choice((1, 1, 1, 1, 1, 0, 4))
        cin = pick.choice((3, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 512, 1024))
        cout = cin if groups == 0 else pick.choice((8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024))
        if groups == 4 and (cin % 4 or cout % 4):
            continue
        groups = cin if groups == 0 else groups
        size = pick.choice((7, 8, 14, 16, 28, 32, 56, 64, 112))
        batch = pick.choice((2, 8, 16, 32, 64))
        if batch * size * size * max(cin, cout) > 1 << 27 or kernel > size:
            continue
        nets.append((pick.choice(("fp32", "fp32", "bf16", "bf16", "fp16")), pick.random() < 0.35, batch, cin, cout, size, kernel, pick.choice((1, 1, 1, 2)), kernel // 2, groups))
    for dtype, last, batch, cin, cout, size, kernel, stride, padding, groups in dict.fromkeys(nets):
        def build(device, dtype=dtype, last=last, batch=batch, cin=cin, cout=cout, size=size, kernel=kernel, stride=stride, padding=padding, groups=groups):
            x = torch.randn(batch, cin, size, size, device=device, dtype=dtypes[dtype])
            w = torch.randn(cout, cin // groups, kernel, kernel, device=device, dtype=dtypes[dtype])
            if last:
                x, w = x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last)
            return (x, w), lambda x, w: nn.conv2d(x, w, stride=stride, padding=padding, groups=groups)

        layout = "nhwc" if last else "nchw"
        yield "conv", f"conv2d {dtype} {layout} n{batch} c{cin} k{cout} s{size} f{kernel} d{stride} p{padding} g{groups}", build
    for dtype in ("fp32", "bf16"):
        for last in (False, True):
            for batch, cin, cout, size, kernel, stride, padding in ((64, 100, 512, 1, 4, 1, 0), (64, 512, 256, 4, 4, 2, 1), (64, 256, 128, 8, 4, 2, 1), (64, 64, 3, 32, 4, 2, 1), (8, 256, 128, 28, 2, 2, 0), (8, 64, 32, 56, 2, 2, 0)):
                def build(device, dtype=dtype, last=last, batch=batch, cin=cin, cout=cout, size=size, kernel=kernel, stride=stride, padding=padding):
                    x = torch.randn(batch, cin, size, size, device=device, dtype=dtypes[dtype])
                    w = torch.randn(cin, cout, kernel, kernel, device=device, dtype=dtypes[dtype])
                    if last:
                        x, w = x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last)
                    return (x, w), lambda x, w: nn.conv_transpose2d(x, w, stride=stride, padding=padding)

                yield "convt", f"conv_transpose2d {dtype} {'nhwc' if last else 'nchw'} n{batch} c{cin} k{cout} s{size} f{kernel} d{stride} p{padding} g1", build
        for batch, cin, cout, size, kernel, groups in ((8, 80, 512, 3000, 3, 1), (8, 512, 512, 1500, 3, 1), (16, 64, 128, 1024, 5, 1), (32, 1, 64, 4096, 9, 1), (8, 256, 256, 512, 1, 1), (8, 256, 256, 1024, 4, 256)):
            def build(device, dtype=dtype, batch=batch, cin=cin, cout=cout, size=size, kernel=kernel, groups=groups):
                return (torch.randn(batch, cin, size, device=device, dtype=dtypes[dtype]), torch.randn(cout, cin // groups, kernel, device=device, dtype=dtypes[dtype])), lambda x, w: nn.conv1d(
                    x, w, padding=kernel // 2, groups=groups
                )

            yield "conv1d", f"conv1d {dtype} n{batch} c{cin} k{cout} s{size} f{kernel} g{groups}", build
        for batch, cin, cout, size, kernel in ((2, 1, 32, 64, 3), (2, 32, 64, 32, 3), (2, 64, 64, 16, 3), (4, 16, 16, 32, 1)):
            def build(device, dtype=dtype, batch=batch, cin=cin, cout=cout, size=size, kernel=kernel):
                return (torch.randn(batch, cin, size, size, size, device=device, dtype=dtypes[dtype]), torch.randn(cout, cin, kernel, kernel, kernel, device=device, dtype=dtypes[dtype])), lambda x, w: nn.conv3d(
                    x, w, padding=kernel // 2
                )

            yield "conv3d", f"conv3d {dtype} n{batch} c{cin} k{cout} s{size} f{kernel}", build


def recurrent(torch):
    for kind in ("LSTM", "GRU", "RNN"):
        for dtype in (torch.float32, torch.bfloat16):
            for steps, batch, width, hidden, layers, both in ((128, 64, 1024, 1024, 2, False), (35, 20, 650, 650, 2, False), (64, 32, 256, 512, 1, False), (64, 32, 256, 256, 3, False), (64, 32, 256, 256, 1, True), (100, 16, 128, 384, 2, True), (200, 8, 40, 96, 1, False)):
                if kind != "LSTM" and layers == 3:
                    continue

                def build(device, kind=kind, dtype=dtype, steps=steps, batch=batch, width=width, hidden=hidden, layers=layers, both=both):
                    net = getattr(torch.nn, kind)(width, hidden, layers, bidirectional=both, dropout=0.1 if layers > 1 else 0.0, batch_first=True, device=device, dtype=dtype)
                    return (torch.randn(batch, steps, width, device=device, dtype=dtype),), lambda x, net=net: net(x)[0]

                yield "rnn", f"{kind} {str(dtype)[6:]} t{steps} b{batch} i{width} h{hidden} l{layers} {'both' if both else 'one'}", build


def attention(torch):
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for batch, heads, kv, rows, columns, width, how in (
            (2, 8, 8, 512, 512, 32, "causal"), (2, 8, 8, 512, 512, 40, "causal"), (2, 8, 8, 512, 512, 72, ""), (2, 8, 8, 512, 512, 80, "causal"), (2, 8, 8, 500, 500, 64, "causal"), (2, 8, 8, 197, 197, 64, ""),
            (2, 8, 8, 512, 512, 96, ""), (2, 8, 8, 512, 512, 160, ""), (2, 8, 8, 512, 512, 192, "causal"), (2, 8, 8, 512, 512, 256, "causal"), (2, 1, 1, 1024, 1024, 512, ""), (2, 8, 8, 512, 512, 60, ""),
            (2, 8, 8, 77, 77, 64, "causal"), (2, 8, 8, 4096, 77, 40, ""), (2, 8, 8, 128, 512, 64, "causal"), (2, 8, 8, 128, 512, 64, ""), (2, 8, 8, 512, 512, 64, "boolmask"), (2, 8, 8, 512, 512, 64, "boolmask_heads"),
            (2, 8, 8, 512, 512, 64, "floatmask"), (2, 8, 8, 500, 500, 64, "boolmask"), (2, 8, 8, 512, 512, 64, "gradmask"), (2, 8, 8, 512, 512, 64, "padmask"), (2, 8, 2, 512, 512, 128, "gqa"), (2, 8, 2, 512, 512, 64, "gqamask"),
            (2, 8, 8, 512, 512, 64, "dropout"), (2, 8, 8, 512, 512, 64, "nograd"), (4, 12, 12, 1024, 1024, 64, "merged"), (2, 8, 8, 1, 512, 64, "nograd"), (2, 8, 8, 1, 4096, 128, "nograd"), (1, 32, 8, 1, 600, 128, "gqanograd"),
            (1, 32, 8, 1, 8200, 128, "gqanograd"), (8, 32, 8, 1, 2050, 128, "gqanograd"), (4, 32, 8, 1, 1030, 128, "gqamasknograd"), (1, 32, 32, 1, 4096, 64, "nograd"), (16, 12, 12, 1, 300, 64, "nograd"), (1, 8, 8, 2, 4096, 64, "nograd"),
            (1, 8, 8, 16, 4096, 64, "nograd"), (1, 32, 32, 1, 4096, 128, "masknograd"), (2, 8, 8, 1, 512, 64, ""), (1, 8, 8, 128, 128, 64, "3d"), (2, 8, 8, 512, 512, 64, "strided"),
        ):  # fmt: skip
            def build(device, dtype=dtype, batch=batch, heads=heads, kv=kv, rows=rows, columns=columns, width=width, how=how):
                make = lambda h, s: torch.randn(batch, h, s, width, device=device, dtype=dtype)
                q, k, v = make(heads, rows), make(kv, columns), make(kv, columns)
                mask, extra = None, {}
                if "gqa" in how:
                    extra["enable_gqa"] = True
                if how == "causal":
                    extra["is_causal"] = True
                if how == "dropout":
                    extra["dropout_p"] = 0.1
                if how.startswith("boolmask") or how in ("gqamask", "gqamasknograd", "masknograd"):
                    mask = torch.ones(batch, heads if how.endswith("heads") else 1, rows, columns, dtype=torch.bool, device=device)
                if how == "padmask":
                    mask = torch.ones(batch, 1, 1, columns, dtype=torch.bool, device=device)
                if how in ("floatmask", "gradmask"):
                    mask = torch.zeros(1, heads, rows, columns, dtype=dtype, device=device)
                if how == "gradmask":
                    return (q, k, v, mask), lambda q, k, v, m: sdpa(q, k, v, attn_mask=m)
                if how == "3d":
                    q, k, v = (t[0] for t in (q, k, v))
                if how == "strided":
                    q = q.transpose(-1, -2).contiguous().transpose(-1, -2)
                if how == "merged":
                    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
                fn = lambda q, k, v: sdpa(q, k, v, attn_mask=mask, **extra)
                return (q, k, v), fn

            suffix = "_ng" if "nograd" in how else ""
            yield "attention", f"sdpa {str(dtype)[6:]} b{batch} h{heads} kv{kv} q{rows} k{columns} d{width} {how}{suffix}", build


def reductions(torch):
    nn = torch.nn.functional
    for dtype in (torch.float32, torch.bfloat16):
        for rows, columns in ((64, 64), (128, 1000), (2048, 2048), (8192, 768), (8192, 3072), (12608, 768), (16384, 1024), (4096, 50257), (32768, 64), (100352, 64), (1000000, 16), (25, 4096), (512, 10), (3001, 77)):
            def build(device, dtype=dtype, rows=rows, columns=columns, dim=0):
                return (torch.randn(rows, columns, device=device, dtype=dtype),), lambda x: x.sum(dim)

            yield "reduce", f"sum0 {str(dtype)[6:]} {rows}x{columns}_ng", build
            yield "reduce", f"sum1 {str(dtype)[6:]} {rows}x{columns}_ng", lambda device, build=build: build(device, dim=1)
            yield "reduce", f"sumall {str(dtype)[6:]} {rows}x{columns}_ng", lambda device, build=build: build(device, dim=(0, 1))
        for shape in ((8, 64, 56, 56), (32, 256, 14, 14), (16, 512, 7, 7), (4, 3, 224, 224), (64, 100, 4, 4)):
            yield "reduce", f"sum023 {str(dtype)[6:]} {shape}_ng", lambda device, shape=shape, dtype=dtype: ((torch.randn(*shape, device=device, dtype=dtype),), lambda x: x.sum((0, 2, 3)))
            yield "reduce", f"sum023cl {str(dtype)[6:]} {shape}_ng", lambda device, shape=shape, dtype=dtype: (
                (torch.randn(*shape, device=device, dtype=dtype).to(memory_format=torch.channels_last),), lambda x: x.sum((0, 2, 3)))  # fmt: skip
    big = (2048, 4096)
    for name, fn in {
        "mean_all": lambda x: x.mean(), "var_all": lambda x: x.var(), "max_all": lambda x: x.max(), "norm_all": lambda x: x.norm(), "mean_last": lambda x: x.mean(-1), "std_first": lambda x: x.std(0), "amax_first": lambda x: x.amax(0),
        "argmax_first": lambda x: x.argmax(0), "max_first": lambda x: x.max(0).values, "logsumexp_first": lambda x: x.logsumexp(0), "any": lambda x: (x > 0).any(), "all_rows": lambda x: (x > 0).all(0), "count": lambda x: (x > 0).sum(),
        "mse": lambda x: nn.mse_loss(x, x.detach()), "l1": lambda x: nn.l1_loss(x, x.detach()), "smooth_l1": lambda x: nn.smooth_l1_loss(x, x.detach()), "huber": lambda x: nn.huber_loss(x, x.detach()),
        "bce_logits": lambda x: nn.binary_cross_entropy_with_logits(x, x.detach()), "kl_div": lambda x: nn.kl_div(x, x.detach(), reduction="batchmean"), "cosine": lambda x: nn.cosine_similarity(x, x.detach()).mean(), "softplus": lambda x: nn.softplus(x).sum(),
        "log_softmax": lambda x: nn.log_softmax(x, -1), "softmax_first": lambda x: nn.softmax(x, 0), "elu": nn.elu, "leaky_relu": lambda x: nn.leaky_relu(x, 0.2), "hardswish": nn.hardswish, "gelu_tanh": lambda x: nn.gelu(x, approximate="tanh"), "mish": nn.mish,
        "silu": nn.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu6": nn.relu6, "selu": nn.selu, "softmax_fp32": lambda x: nn.softmax(x, -1, dtype=torch.float32), "glu": lambda x: nn.glu(x, -1), "cumprod": lambda x: x.cumprod(-1), "normalize": lambda x: nn.normalize(x, dim=-1),
        "quantile_ng": lambda x: x.detach()[0].quantile(0.5), "median_ng": lambda x: x.detach().median(), "clip_grad": lambda x: torch.linalg.vector_norm(x), "pow3": lambda x: x.pow(3), "sqrt": lambda x: x.abs().sqrt(), "rsqrt": lambda x: x.abs().rsqrt(), "exp": torch.exp, "log": lambda x: x.abs().log(),
        "div_self": lambda x: x / (x.abs() + 1), "addcmul": lambda x: torch.addcmul(x, x, x), "lerp": lambda x: torch.lerp(x, x * 2, 0.5), "maximum": lambda x: torch.maximum(x, x * 2), "clamp_min": lambda x: x.clamp(min=0), "expand_mul": lambda x: x * x[:1],
    }.items():  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16):
            yield "pointwise", f"{name} {str(dtype)[6:]}", lambda device, fn=fn, dtype=dtype: ((torch.randn(*big, device=device, dtype=dtype),), fn)


def norms(torch):
    nn = torch.nn.functional
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype)[6:]
        for shape in ((8, 64, 56, 56), (32, 256, 14, 14), (64, 512, 4, 4), (16, 32, 112, 112)):
            for last in (False, True):
                def image(device, shape=shape, dtype=dtype, last=last):
                    x = torch.randn(*shape, device=device, dtype=dtype)
                    return x.to(memory_format=torch.channels_last) if last else x

                def batch_norm(device, image=image, shape=shape, training=True):
                    mean, var = torch.zeros(shape[1], device=device), torch.ones(shape[1], device=device)
                    weight, bias = torch.ones(shape[1], device=device), torch.zeros(shape[1], device=device)
                    return (image(device), weight, bias), lambda x, w, b: nn.batch_norm(x, mean, var, w, b, training)

                layout = "nhwc" if last else "nchw"
                yield "norm", f"batch_norm {short} {layout} {shape}", batch_norm
                yield "norm", f"batch_norm_eval {short} {layout} {shape}", lambda device, batch_norm=batch_norm: batch_norm(device, training=False)
                yield "norm", f"group_norm {short} {layout} {shape}", lambda device, image=image, shape=shape, dtype=dtype: (
                    (image(device), torch.ones(shape[1], device=device, dtype=dtype), torch.zeros(shape[1], device=device, dtype=dtype)), lambda x, w, b: nn.group_norm(x, 8, w, b))  # fmt: skip
                yield "norm", f"instance_norm {short} {layout} {shape}", lambda device, image=image: ((image(device),), lambda x: nn.instance_norm(x))
                yield "norm", f"max_pool {short} {layout} {shape}", lambda device, image=image: ((image(device),), lambda x: nn.max_pool2d(x, 2))
                yield "norm", f"avg_pool {short} {layout} {shape}", lambda device, image=image: ((image(device),), lambda x: nn.avg_pool2d(x, 2))
                yield "norm", f"adaptive {short} {layout} {shape}", lambda device, image=image: ((image(device),), lambda x: nn.adaptive_avg_pool2d(x, (2, 2)))
                yield "norm", f"nearest {short} {layout} {shape}", lambda device, image=image: ((image(device),), lambda x: nn.interpolate(x, scale_factor=2))
                yield "norm", f"bilinear {short} {layout} {shape}", lambda device, image=image: ((image(device),), lambda x: nn.interpolate(x, scale_factor=2, mode="bilinear"))
        for rows, columns in ((512, 64), (8192, 768), (4096, 4096), (200, 1000), (16384, 100)):
            yield "norm", f"layer_norm {short} {rows}x{columns}", lambda device, rows=rows, columns=columns, dtype=dtype: (
                (torch.randn(rows, columns, device=device, dtype=dtype), torch.ones(columns, device=device, dtype=dtype), torch.zeros(columns, device=device, dtype=dtype)), lambda x, w, b: nn.layer_norm(x, (x.shape[-1],), w, b))  # fmt: skip
            yield "norm", f"rms_norm {short} {rows}x{columns}", lambda device, rows=rows, columns=columns, dtype=dtype: (
                (torch.randn(rows, columns, device=device, dtype=dtype), torch.ones(columns, device=device, dtype=dtype)), lambda x, w: nn.rms_norm(x, (x.shape[-1],), w))  # fmt: skip
            yield "norm", f"softmax {short} {rows}x{columns}", lambda device, rows=rows, columns=columns, dtype=dtype: ((torch.randn(rows, columns, device=device, dtype=dtype),), lambda x: nn.softmax(x, -1))
            yield "norm", f"cross_entropy {short} {rows}x{columns}", lambda device, rows=rows, columns=columns, dtype=dtype: (
                (torch.randn(rows, columns, device=device, dtype=dtype), torch.randint(0, columns, (rows,), device=device)), lambda x, t: nn.cross_entropy(x, t))  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        yield "norm", f"cross_entropy2d {str(dtype)[6:]}", lambda device, dtype=dtype: (
            (torch.randn(4, 21, 128, 128, device=device, dtype=dtype), torch.randint(0, 21, (4, 128, 128), device=device)), lambda x, t: nn.cross_entropy(x, t))  # fmt: skip
        yield "norm", f"cross_entropy_smooth {str(dtype)[6:]}", lambda device, dtype=dtype: (
            (torch.randn(1024, 1000, device=device, dtype=dtype), torch.randint(0, 1000, (1024,), device=device)), lambda x, t: nn.cross_entropy(x, t, label_smoothing=0.1))  # fmt: skip


def selections(torch):
    nn = torch.nn.functional
    for rows, columns in ((1, 1 << 20), (1024, 1024), (64, 32000), (8, 128256), (4096, 64), (1, 50257), (16, 5000)):
        make = lambda device, rows=rows, columns=columns: (torch.randn(rows, columns, device=device),)
        for name, fn in {
            "sort": lambda x: torch.sort(x, -1), "argsort": lambda x: x.argsort(-1), "topk8": lambda x: torch.topk(x, 8), "topk50": lambda x: torch.topk(x, 50), "argmax": lambda x: x.argmax(-1), "cumsum": lambda x: x.cumsum(-1), "kthvalue": lambda x: x.kthvalue(3),
            "nonzero": lambda x: (x > 0).nonzero(), "masked": lambda x: x[x > 0], "multinomial": lambda x: torch.multinomial(x.softmax(-1), 1) if x.shape[1] < 1 << 24 else x, "masked_fill": lambda x: x.masked_fill(x > 0, 0.0), "scatter": lambda x: torch.zeros_like(x).scatter(1, x.argmax(-1, keepdim=True), 1.0),
        }.items():  # fmt: skip
            yield "select", f"{name} {rows}x{columns}_ng", lambda device, make=make, fn=fn: (make(device), fn)
    for count in (100, 5000, 1 << 16, 1 << 20):
        ints = lambda device, count=count: (torch.randint(0, 1000, (count,), device=device),)
        for name, fn in {"unique": lambda a: a.unique(), "unique_inverse": lambda a: torch.unique(a, return_inverse=True, return_counts=True), "bincount": lambda a: a.bincount(), "one_hot": lambda a: nn.one_hot(a[:1000], 1000), "sort_int": lambda a: a.sort(), "cumsum_int": lambda a: a.cumsum(0), "eq_sum": lambda a: (a == 3).sum(), "histc": lambda a: a.float().histc(100)}.items():
            yield "select", f"{name} {count}_ng", lambda device, ints=ints, fn=fn: (ints(device), fn)
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype)[6:]
        for vocab, width, count in ((1000, 256, 4096), (50257, 768, 8192), (30522, 768, 3072), (32000, 64, 100), (128, 1024, 20000), (128, 512, 3000)):
            yield "index", f"embedding {short} v{vocab} w{width} n{count}", lambda device, vocab=vocab, width=width, count=count, dtype=dtype: (
                (torch.randn(vocab, width, device=device, dtype=dtype), torch.randint(0, vocab, (count,), device=device)), lambda w, i: nn.embedding(i, w))  # fmt: skip
            yield "index", f"embedding_pad {short} v{vocab} w{width} n{count}", lambda device, vocab=vocab, width=width, count=count, dtype=dtype: (
                (torch.randn(vocab, width, device=device, dtype=dtype), torch.randint(0, vocab, (count,), device=device)), lambda w, i: nn.embedding(i, w, padding_idx=0))  # fmt: skip
            yield "index", f"index {short} v{vocab} w{width} n{count}", lambda device, vocab=vocab, width=width, count=count, dtype=dtype: (
                (torch.randn(vocab, width, device=device, dtype=dtype), torch.randint(0, vocab, (count,), device=device)), lambda w, i: w[i])  # fmt: skip
            yield "index", f"index_select {short} v{vocab} w{width} n{count}", lambda device, vocab=vocab, width=width, count=count, dtype=dtype: (
                (torch.randn(vocab, width, device=device, dtype=dtype), torch.randint(0, vocab, (count,), device=device)), lambda w, i: w.index_select(0, i))  # fmt: skip
            yield "index", f"index_add {short} v{vocab} w{width} n{count}", lambda device, vocab=vocab, width=width, count=count, dtype=dtype: (
                (torch.randn(count, width, device=device, dtype=dtype), torch.randint(0, vocab, (count,), device=device)), lambda x, i: torch.zeros(vocab, width, device=x.device, dtype=x.dtype).index_add(0, i, x))  # fmt: skip
            yield "index", f"embedding_bag {short} v{vocab} w{width} n{count}", lambda device, vocab=vocab, width=width, count=count, dtype=dtype: (
                (torch.randn(vocab, width, device=device, dtype=dtype), torch.randint(0, vocab, (count // 4, 4), device=device)), lambda w, i: nn.embedding_bag(i, w, mode="mean"))  # fmt: skip
    yield "index", "gather 1024x1024", lambda device: ((torch.randn(1024, 1024, device=device), torch.randint(0, 1024, (1024, 8), device=device)), lambda x, i: x.gather(1, i))
    yield "index", "grid_sample", lambda device: ((torch.randn(4, 16, 64, 64, device=device), torch.randn(4, 32, 32, 2, device=device)), lambda x, g: nn.grid_sample(x, g, align_corners=False))
    yield "index", "pixel_shuffle", lambda device: ((torch.randn(4, 64, 64, 64, device=device),), lambda x: nn.pixel_shuffle(x, 2))
    yield "index", "unfold", lambda device: ((torch.randn(4, 16, 64, 64, device=device),), lambda x: nn.unfold(x, 3, padding=1))


def layers(torch):
    nn = torch.nn

    def whole(make, shape, dtype, call=lambda net, x: net(x)):
        def build(device):
            net = make().to(device=device, dtype=dtype)
            x = torch.randn(*shape, device=device, dtype=dtype)
            return (x,), lambda x, net=net: call(net, x)

        return build

    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype)[6:]
        yield "layer", f"mha {short}", whole(lambda: nn.MultiheadAttention(512, 8, batch_first=True), (4, 256, 512), dtype, lambda net, x: net(x, x, x, need_weights=False)[0])
        yield "layer", f"mha_weights {short}", whole(lambda: nn.MultiheadAttention(512, 8, batch_first=True), (4, 256, 512), dtype, lambda net, x: net(x, x, x)[0])
        yield "layer", f"encoder {short}", whole(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 2), (4, 256, 512), dtype)
        yield "layer", f"encoder_eval_ng {short}", whole(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 2).eval(), (4, 256, 512), dtype)
        yield "layer", f"encoder_padded_ng {short}", whole(
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 2).eval(), (4, 256, 512), dtype,
            lambda net, x: net(x, src_key_padding_mask=torch.arange(256, device=x.device)[None] >= torch.tensor([256, 200, 100, 50], device=x.device)[:, None]))  # fmt: skip
        for rows, inner, outer in ((8192, 768, 3072), (512, 1024, 1000), (16, 4096, 10), (100352, 96, 384), (4096, 4096, 14336), (33, 77, 99)):
            yield "layer", f"linear {short} {rows}x{inner}x{outer}", whole(lambda inner=inner, outer=outer: nn.Linear(inner, outer), (rows, inner), dtype)
        yield "layer", f"conv_bias {short}", whole(lambda: nn.Conv2d(64, 64, 3, padding=1), (8, 64, 56, 56), dtype)
        yield "layer", f"convt_bias {short}", whole(lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1), (8, 64, 28, 28), dtype)
    yield "layer", "fft", lambda device: ((torch.randn(64, 4096, device=device),), lambda x: torch.fft.rfft(x).abs())
    yield "layer", "cdist", lambda device: ((torch.randn(500, 64, device=device), torch.randn(700, 64, device=device)), torch.cdist)
    yield "layer", "cholesky", lambda device: ((torch.eye(512, device=device),), torch.linalg.cholesky)
    yield "layer", "einsum", lambda device: ((torch.randn(4, 8, 128, 64, device=device), torch.randn(4, 8, 128, 64, device=device)), lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k))


def cases(torch):
    """All cases, the ones that are known least first."""
    for part in (attention, recurrent, layers, reductions, norms, selections, convolutions):
        yield from part(torch)
