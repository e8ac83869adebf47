"""More operators whose memory on a GPU a prediction has to know: linear algebra, Fourier transforms, selecting, sparse gradients, losses.

The same form as operator_cases.py: ``cases(torch)`` yields ``(section, name, build)``. ``_ng`` in a name: without gradients.
"""

from __future__ import annotations


def _plain(torch, *shapes, dtype=None, change=lambda *t: t):
    def make(device):
        return change(*(torch.randn(*s, device=device, dtype=dtype or torch.float32) for s in shapes))

    return make


def algebra(torch):
    la = torch.linalg
    known = {
        "cholesky": lambda a: la.cholesky(a @ a.mT + a.shape[-1] * torch.eye(a.shape[-1], device=a.device)), "qr": lambda a: la.qr(a), "svd": lambda a: la.svd(a, full_matrices=False), "svd_full_ng": lambda a: la.svd(a), "svdvals": lambda a: la.svdvals(a),
        "eigh": lambda a: la.eigh(a + a.mT), "eigvalsh": lambda a: la.eigvalsh(a + a.mT), "eig_ng": lambda a: la.eig(a), "solve": lambda a: la.solve(a, a.mT), "inv": lambda a: la.inv(a), "det": lambda a: la.det(a), "slogdet": lambda a: la.slogdet(a)[1], "lu_ng": lambda a: la.lu(a),
        "lu_factor_ng": lambda a: la.lu_factor(a), "triangular": lambda a: la.solve_triangular(a.tril(), a, upper=False), "lstsq_ng": lambda a: la.lstsq(a, a[..., :4]).solution, "pinv_ng": lambda a: la.pinv(a), "matrix_exp": lambda a: la.matrix_exp(a), "matrix_power": lambda a: la.matrix_power(a, 3),
        "cholesky_solve": lambda a: torch.cholesky_solve(a, (a @ a.mT + a.shape[-1] * torch.eye(a.shape[-1], device=a.device)).tril()), "cholesky_inverse": lambda a: torch.cholesky_inverse(a.tril()), "norm_nuc_ng": lambda a: la.matrix_norm(a, "nuc"), "norm_2_ng": lambda a: la.matrix_norm(a, 2), "rank_ng": lambda a: la.matrix_rank(a),
        "logdet": lambda a: torch.logdet(a @ a.mT + torch.eye(a.shape[-1], device=a.device)), "cond_ng": lambda a: la.cond(a),
    }  # fmt: skip
    for name, fn in known.items():
        for shape in ((64, 64), (500, 500), (2048, 2048), (64, 32, 32), (8, 300, 300)):
            if shape == (2048, 2048) and name in ("eig_ng", "svd_full_ng", "svd", "svdvals", "norm_nuc_ng", "norm_2_ng", "rank_ng", "cond_ng", "pinv_ng", "matrix_exp"):
                continue
            if name == "eig_ng" and shape != (64, 64):
                continue
            yield "algebra", f"{name} {'x'.join(map(str, shape))}", lambda device, fn=fn, shape=shape: (_plain(torch, shape)(device), fn)
    for rows, columns in ((1024, 64), (4096, 16), (64, 1024), (300, 200)):
        for name in ("qr", "svd", "svdvals", "lstsq_ng"):
            if name == "lstsq_ng" and rows < columns:
                continue
            yield "algebra", f"{name} {rows}x{columns}", lambda device, fn=known[name], rows=rows, columns=columns: (_plain(torch, (rows, columns))(device), fn)
    for name in ("cholesky", "qr", "svd", "eigh", "inv", "solve"):
        yield "algebra", f"{name} double 256x256", lambda device, fn=known[name]: (_plain(torch, (256, 256), dtype=torch.float64)(device), lambda a, fn=fn: fn(a) if fn is not known["cholesky"] else la.cholesky(a @ a.mT + 256 * torch.eye(256, device=a.device, dtype=a.dtype)))


def fourier(torch):
    f = torch.fft
    for shape in ((64, 4096), (64, 1000), (64, 1023), (64, 997), (16, 65536), (4, 1 << 20), (2048, 256), (512, 2048), (8, 8192), (8, 16384), (8, 32768), (128, 1536), (100, 3000), (64, 32000)):
        for name, fn in {"fft": lambda x: f.fft(x), "rfft": lambda x: f.rfft(x), "irfft": lambda x: f.irfft(torch.complex(x, x)), "cfft": lambda x: f.fft(torch.complex(x, x)), "cifft": lambda x: f.ifft(torch.complex(x, x))}.items():
            yield "fourier", f"{name} {shape[0]}x{shape[1]}", lambda device, fn=fn, shape=shape: (_plain(torch, shape)(device), fn)
    for shape in ((8, 64, 64), (16, 96, 96), (48, 128, 128), (4, 256, 256), (2, 1024, 1024), (8, 100, 120), (3, 509, 64)):
        for name, fn in {"fft2": lambda x: f.fft2(x), "rfft2": lambda x: f.rfft2(x), "irfft2": lambda x: f.irfft2(torch.complex(x, x)), "ifft2": lambda x: f.ifft2(torch.complex(x, x)), "shift": lambda x: f.fftshift(f.fft2(x))}.items():
            yield "fourier", f"{name} {'x'.join(map(str, shape))}", lambda device, fn=fn, shape=shape: (_plain(torch, shape)(device), fn)
    for shape in ((2, 64, 64, 64), (1, 32, 48, 40)):
        yield "fourier", f"fftn {'x'.join(map(str, shape))}", lambda device, shape=shape: (_plain(torch, shape)(device), lambda x: f.fftn(x, dim=(1, 2, 3)))
        yield "fourier", f"rfftn {'x'.join(map(str, shape))}", lambda device, shape=shape: (_plain(torch, shape)(device), lambda x: f.rfftn(x, dim=(1, 2, 3)))
    for size, hop, length in ((512, 128, 32000), (1024, 256, 32000), (2048, 512, 32000), (400, 160, 48000)):
        def stft(device, size=size, hop=hop, length=length):
            window = torch.hann_window(size, device=device)
            return _plain(torch, (8, length))(device), lambda x: torch.stft(x, size, hop, window=window, return_complex=True).abs()

        def back(device, size=size, hop=hop, length=length):
            window = torch.hann_window(size, device=device)
            return _plain(torch, (8, length))(device), lambda x: torch.istft(torch.stft(x, size, hop, window=window, return_complex=True), size, hop, window=window)

        yield "fourier", f"stft {size} {hop} {length}", stft
        yield "fourier", f"istft {size} {hop} {length}", back
    yield "fourier", "fft dim0 1024x96", lambda device: (_plain(torch, (1024, 96))(device), lambda x: f.rfft(x, dim=0))
    yield "fourier", "hfft 64x1000", lambda device: (_plain(torch, (64, 1000))(device), lambda x: f.hfft(torch.complex(x, x)))


def selecting(torch):
    for shape in ((8, 1024, 1024), (2048, 2048), (4096, 8192), (256, 100), (32, 65536), (1, 4_000_000), (128, 20000), (16384, 8), (1000000,), (8, 8732)):
        n = shape[-1]
        for name, fn in {
            "topk1": lambda x: x.topk(1), "topk16": lambda x: x.topk(min(8, x.shape[-1])), "topk100": lambda x: x.topk(min(100, x.shape[-1])), "topk_half": lambda x: x.topk(max(1, x.shape[-1] // 2)), "topk_unsorted": lambda x: x.topk(min(16, x.shape[-1]), sorted=False), "topk_small": lambda x: x.topk(min(4, x.shape[-1]), largest=False),
            "sort": lambda x: x.sort(-1), "sort_desc": lambda x: x.sort(-1, descending=True), "stable": lambda x: x.sort(stable=True, dim=-1), "kthvalue": lambda x: x.kthvalue(2), "median": lambda x: x.median(-1), "mode": lambda x: x.round().mode(-1), "cummax": lambda x: x.cummax(-1), "cumprod": lambda x: x.cumprod(-1), "cumsum": lambda x: x.cumsum(-1),
            "logcumsumexp": lambda x: x.logcumsumexp(-1), "quantile": lambda x: x.quantile(0.5, dim=-1), "argmin": lambda x: x.argmin(-1), "max": lambda x: x.max(-1), "aminmax": lambda x: torch.aminmax(x), "multinomial8": lambda x: x.softmax(-1).multinomial(min(8, x.shape[-1])), "multinomial_again": lambda x: x.softmax(-1).multinomial(4, replacement=True),
        }.items():  # fmt: skip
            if (name == "quantile" and x_too_many(shape)) or (name.startswith("multinomial") and (len(shape) > 2 or n > 1 << 20)) or (name == "mode" and n > 1 << 17):
                continue
            yield "selecting", f"{name} {'x'.join(map(str, shape))}_ng", lambda device, fn=fn, shape=shape: (_plain(torch, shape)(device), fn)
    for dtype in (torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.float64):
        for name, fn in {"sort": lambda x: x.sort(-1), "topk": lambda x: x.topk(20, dim=-1), "argsort": lambda x: x.argsort(-1), "unique": lambda x: x.unique(), "sort0": lambda x: x.sort(0), "cumsum": lambda x: x.cumsum(-1), "cumsum0": lambda x: x.cumsum(0)}.items():
            if dtype is torch.bool and name == "topk":
                continue
            yield "selecting", f"{name} {str(dtype)[6:]} 512x3000_ng", lambda device, fn=fn, dtype=dtype: ((torch.randint(0, 2 if dtype is torch.bool else 500, (512, 3000), device=device).to(dtype),), fn)
    for name, fn in {
        "topk_bwd": lambda x: x.topk(8).values, "sort_bwd": lambda x: x.sort(-1).values, "median_bwd": lambda x: x.median(-1).values, "max_bwd": lambda x: x.max(-1).values, "amax_bwd": lambda x: x.amax(-1), "cummax_bwd": lambda x: x.cummax(-1).values, "cumsum_bwd": lambda x: x.cumsum(-1), "cumprod_bwd": lambda x: x.cumprod(-1), "prod_bwd": lambda x: x.prod(-1),
        "logcumsumexp_bwd": lambda x: x.logcumsumexp(-1), "quantile_bwd": lambda x: x.quantile(0.5, dim=-1), "kthvalue_bwd": lambda x: x.kthvalue(3).values, "topk0_bwd": lambda x: x.topk(8, dim=0).values, "sort0_bwd": lambda x: x.sort(0).values, "cumsum0_bwd": lambda x: x.cumsum(0), "masked_select_bwd": lambda x: torch.masked_select(x, x > 0), "index_mask_bwd": lambda x: x[x > 0],
        "min_bwd": lambda x: x.min(), "where_bwd": lambda x: torch.where(x > 0, x, 2 * x), "gather_bwd": lambda x: x.gather(1, x.argsort(-1)), "take_bwd": lambda x: x.take(torch.arange(5000, device=x.device)), "diff_bwd": lambda x: x.diff(dim=-1), "flip_bwd": lambda x: x.flip(-1), "roll_bwd": lambda x: x.roll(3, -1), "renorm_bwd": lambda x: x.renorm(2, 0, 1.0),
    }.items():  # fmt: skip
        yield "selecting", f"{name} 1024x2000", lambda device, fn=fn: (_plain(torch, (1024, 2000))(device), fn)
    for count in (1000, 30_000, 2_000_000):
        ints = lambda device, count=count: (torch.randint(0, 5000, (count,), device=device),)
        for name, fn in {
            "unique": lambda a: a.unique(), "unique_counts": lambda a: a.unique(return_counts=True), "unique_inverse": lambda a: a.unique(return_inverse=True), "consecutive": lambda a: a.unique_consecutive(return_counts=True), "unique_dim": lambda a: a.view(-1, 10).unique(dim=0), "bincount": lambda a: a.bincount(minlength=5000), "nonzero": lambda a: (a % 3 == 0).nonzero(),
            "mask": lambda a: a[a > 2500], "searchsorted": lambda a: torch.searchsorted(torch.arange(5000, device=a.device), a), "isin": lambda a: torch.isin(a, a[:100]), "bucketize": lambda a: torch.bucketize(a, torch.arange(100, device=a.device)), "repeat_interleave": lambda a: torch.repeat_interleave(a[:1000], a[:1000] % 7), "argwhere": lambda a: torch.argwhere(a > 10), "randperm": lambda a: torch.randperm(a.numel(), device=a.device),
            "histc": lambda a: a.float().histc(50), "any": lambda a: (a == 1).any(), "cumsum": lambda a: a.cumsum(0), "count_nonzero": lambda a: a.count_nonzero(), "triu": lambda a: torch.triu_indices(400, 400, device=a.device), "combos": lambda a: torch.combinations(a[:200]), "cartesian": lambda a: torch.cartesian_prod(a[:200], a[:100]), "bernoulli": lambda a: torch.bernoulli(torch.full((a.numel(),), 0.3, device=a.device)),
        }.items():  # fmt: skip
            yield "selecting", f"{name} {count}_ng", lambda device, ints=ints, fn=fn: (ints(device), fn)


def x_too_many(shape):
    total = 1
    for size in shape:
        total *= size
    return total > 16_000_000


def scattering(torch):
    nn = torch.nn.functional
    for dtype in (torch.float32, torch.bfloat16):
        for rows, count, width in ((1000, 20_000, 64), (40_000, 200_000, 32), (5000, 3000, 256)):
            place = lambda device, rows=rows, count=count: torch.randint(0, rows, (count,), device=device)

            def make(device, fn, rows=rows, count=count, width=width, dtype=dtype, place=place):
                return (torch.randn(count, width, device=device, dtype=dtype), torch.randn(rows, width, device=device, dtype=dtype), place(device)), fn

            for name, fn in {
                "index_add": lambda x, w, i: torch.zeros_like(w).index_add(0, i, x), "scatter_add": lambda x, w, i: torch.zeros_like(w).scatter_add(0, i[:, None].expand_as(x), x), "scatter_mean": lambda x, w, i: torch.zeros_like(w).scatter_reduce(0, i[:, None].expand_as(x), x, "mean", include_self=False),
                "scatter_amax": lambda x, w, i: torch.zeros_like(w).scatter_reduce(0, i[:, None].expand_as(x), x, "amax"), "index_reduce": lambda x, w, i: torch.zeros_like(w).index_reduce(0, i, x.detach(), "amax"), "gather_rows": lambda x, w, i: w[i] * x, "select_rows": lambda x, w, i: w.index_select(0, i) + x, "gather": lambda x, w, i: w.gather(0, i[:, None].expand_as(x)) * x,
                "index_put": lambda x, w, i: w.index_put((i,), x), "index_put_add": lambda x, w, i: w.index_put((i,), x, accumulate=True), "index_copy": lambda x, w, i: w.index_copy(0, i[: w.shape[0]], x[: min(i.shape[0], w.shape[0])]), "take_along": lambda x, w, i: torch.take_along_dim(w, i[:, None], 0), "two_indices": lambda x, w, i: w[i, i % w.shape[1]] * x[:, 0],
                "embedding": lambda x, w, i: nn.embedding(i, w), "embedding_freq": lambda x, w, i: nn.embedding(i, w, scale_grad_by_freq=True), "bag_sum": lambda x, w, i: nn.embedding_bag(i.view(-1, 4), w, mode="sum"), "bag_max": lambda x, w, i: nn.embedding_bag(i.view(-1, 4), w, mode="max"), "bag_offsets": lambda x, w, i: nn.embedding_bag(i, w, torch.arange(0, i.numel(), 5, device=i.device), mode="mean"),
                "bag_weights": lambda x, w, i: nn.embedding_bag(i.view(-1, 4), w, per_sample_weights=x[:, 0].reshape(-1, 4), mode="sum"),
                "segment": lambda x, w, i: torch.segment_reduce(x.float(), "sum", lengths=torch.full((x.shape[0] // 10,), 10, device=x.device)),
            }.items():  # fmt: skip
                yield "scattering", f"{name} {str(dtype)[6:]} r{rows} n{count} w{width}", lambda device, make=make, fn=fn: make(device, fn)
    for rows, count, width in ((1000, 20_000, 64), (200_000, 16_384, 64), (500_000, 3000, 128)):
        def sparse(device, fn, rows=rows, count=count, width=width):
            return (torch.randn(rows, width, device=device), torch.randint(0, rows, (count,), device=device)), fn

        for name, fn in {"sparse_embedding": lambda w, i: nn.embedding(i, w, sparse=True), "sparse_bag": lambda w, i: nn.embedding_bag(i.view(-1, 4), w, mode="sum", sparse=True), "sparse_bag_mean": lambda w, i: nn.embedding_bag(i.view(-1, 4), w, mode="mean", sparse=True)}.items():
            yield "scattering", f"{name} r{rows} n{count} w{width}", lambda device, sparse=sparse, fn=fn: sparse(device, fn)

        def grown(device, optimizer, rows=rows, count=count, width=width):
            w = torch.nn.Parameter(torch.randn(rows, width, device=device))
            o, i = optimizer([w]), torch.randint(0, rows, (count,), device=device)

            def step(x):
                for _ in range(2):
                    with torch.enable_grad():
                        nn.embedding(i, w, sparse=True).sum().backward()
                    o.step()
                    o.zero_grad()
                return x.clone()

            return (torch.zeros(8, device=device),), step

        for name, kind in {"sgd": lambda p: torch.optim.SGD(p, lr=0.1), "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "sparse_adam": lambda p: torch.optim.SparseAdam(p), "adagrad": lambda p: torch.optim.Adagrad(p)}.items():
            yield "scattering", f"sparse_step {name} r{rows} n{count} w{width}_ng", lambda device, grown=grown, kind=kind: grown(device, kind)

        def coalesce(device, rows=rows, count=count, width=width):
            i, v = torch.randint(0, rows, (1, count), device=device), torch.randn(count, width, device=device)
            return (v,), lambda v: torch.sparse_coo_tensor(i, v, (rows, width)).coalesce()

        yield "scattering", f"coalesce r{rows} n{count} w{width}_ng", coalesce

        def product(device, rows=rows, count=count, width=width):
            rows = min(rows, 20_000)
            i, v, x = torch.randint(0, rows, (2, count), device=device), torch.rand(count, device=device), torch.randn(rows, width, device=device)
            a = torch.sparse_coo_tensor(i, v, (rows, rows)).coalesce()
            return (x,), lambda x: torch.sparse.mm(a, x)

        yield "scattering", f"sparse_mm r{rows} n{count} w{width}", product


def pictures(torch):
    nn = torch.nn.functional
    for shape in ((8, 32, 64, 64), (4, 3, 224, 224), (2, 128, 28, 28)):
        for last in (False, True):
            image = lambda device, shape=shape, last=last: (torch.randn(*shape, device=device).to(memory_format=torch.channels_last if last else torch.contiguous_format),)
            for name, fn in {
                "bicubic": lambda x: nn.interpolate(x, scale_factor=2, mode="bicubic"), "antialias": lambda x: nn.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True), "area": lambda x: nn.interpolate(x, scale_factor=0.5, mode="area"), "bilinear_down": lambda x: nn.interpolate(x, size=(20, 20), mode="bilinear"), "nearest_exact": lambda x: nn.interpolate(x, scale_factor=2, mode="nearest-exact"),
                "adaptive_max": lambda x: nn.adaptive_max_pool2d(x, 4), "adaptive_one": lambda x: nn.adaptive_avg_pool2d(x, 1), "max3": lambda x: nn.max_pool2d(x, 3, 2, 1), "avg3": lambda x: nn.avg_pool2d(x, 3, 2, 1), "lp": lambda x: nn.lp_pool2d(x, 2, 2), "unpool": lambda x: nn.max_unpool2d(*nn.max_pool2d(x, 2, return_indices=True), 2), "reflect": lambda x: nn.pad(x, (2, 2, 2, 2), mode="reflect"),
                "replicate": lambda x: nn.pad(x, (2, 2, 2, 2), mode="replicate"), "circular": lambda x: nn.pad(x, (2, 2, 2, 2), mode="circular"), "zeros": lambda x: nn.pad(x, (2, 2, 2, 2)), "unshuffle": lambda x: nn.pixel_unshuffle(x, 2), "group_norm": lambda x: nn.group_norm(x, 1), "instance_norm": lambda x: nn.instance_norm(x), "local_norm": lambda x: nn.local_response_norm(x, 5), "dropout2d": lambda x: nn.dropout2d(x, 0.5),
                "fold": lambda x: nn.fold(nn.unfold(x, 2, stride=2), x.shape[-2:], 2, stride=2), "grid": lambda x: nn.grid_sample(x, nn.affine_grid(torch.eye(2, 3, device=x.device).expand(x.shape[0], 2, 3), x.shape, align_corners=False), align_corners=False), "channel_shuffle": lambda x: nn.channel_shuffle(x, 1), "fractional": lambda x: nn.fractional_max_pool2d(x, 2, output_ratio=0.5), "prelu": lambda x: nn.prelu(x, torch.full((x.shape[1],), 0.2, device=x.device)),
                "glu": lambda x: nn.glu(torch.cat([x, x], 1), 1), "rrelu": lambda x: nn.rrelu(x, training=True), "softmax2d": lambda x: nn.softmax(x, 1), "log_softmax2d": lambda x: nn.log_softmax(x, 1), "normalize": lambda x: nn.normalize(x, dim=1), "mean_hw": lambda x: x.mean((2, 3)), "std_hw": lambda x: x.std((2, 3)), "var_mean": lambda x: torch.var_mean(x, (0, 2, 3))[0],
            }.items():  # fmt: skip
                yield "pictures", f"{name} {'nhwc' if last else 'nchw'} {'x'.join(map(str, shape))}", lambda device, image=image, fn=fn: (image(device), fn)
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype)[6:]
        for shape in ((2, 16, 32, 32, 32), (4, 64, 8, 28, 28)):
            for name, fn in {"max3d": lambda x: nn.max_pool3d(x, 2), "avg3d": lambda x: nn.avg_pool3d(x, 2), "adaptive3d": lambda x: nn.adaptive_avg_pool3d(x, 1), "trilinear": lambda x: nn.interpolate(x, scale_factor=2, mode="trilinear"), "nearest3d": lambda x: nn.interpolate(x, scale_factor=2), "instance3d": lambda x: nn.instance_norm(x), "group3d": lambda x: nn.group_norm(x, 4)}.items():
                yield "pictures", f"{name} {short} {'x'.join(map(str, shape))}", lambda device, fn=fn, shape=shape, dtype=dtype: (_plain(torch, shape, dtype=dtype)(device), fn)
        for shape in ((16, 64, 1000), (8, 256, 333)):
            for name, fn in {"max1d": lambda x: nn.max_pool1d(x, 2), "avg1d": lambda x: nn.avg_pool1d(x, 2), "linear1d": lambda x: nn.interpolate(x, scale_factor=2, mode="linear"), "group1d": lambda x: nn.group_norm(x, 8), "instance1d": lambda x: nn.instance_norm(x), "weighted": lambda x: nn.conv1d(x, torch.ones(1, x.shape[1], 3, device=x.device, dtype=x.dtype))}.items():
                yield "pictures", f"{name} {short} {'x'.join(map(str, shape))}", lambda device, fn=fn, shape=shape, dtype=dtype: (_plain(torch, shape, dtype=dtype)(device), fn)
        for shape in ((4096, 512), (32, 64, 500), (16, 32, 8, 14, 14)):
            def norm(device, shape=shape, dtype=dtype):
                mean, var = torch.zeros(shape[1], device=device), torch.ones(shape[1], device=device)
                return (torch.randn(*shape, device=device, dtype=dtype), torch.ones(shape[1], device=device), torch.zeros(shape[1], device=device)), lambda x, w, b: nn.batch_norm(x, mean, var, w, b, training=True)

            yield "pictures", f"batch_norm {short} {'x'.join(map(str, shape))}", norm


def losses(torch):
    nn = torch.nn.functional
    for steps, batch, vocabulary, length in ((300, 16, 29, 60), (100, 4, 5000, 20), (500, 8, 32, 100), (50, 64, 100, 10)):
        for name in ("ctc", "ctc_cpu_lengths", "ctc_int"):
            def ctc(device, name=name, steps=steps, batch=batch, vocabulary=vocabulary, length=length):
                kind = torch.int32 if name == "ctc_int" else torch.int64
                where = device if name == "ctc" else "cpu"
                y = torch.randint(1, vocabulary, (batch * length,) if name == "ctc_int" else (batch, length), device="cpu" if name == "ctc_int" else device, dtype=kind)
                a, b = torch.full((batch,), steps, dtype=kind, device=where), torch.full((batch,), length, dtype=kind, device=where)
                return _plain(torch, (steps, batch, vocabulary))(device), lambda x: nn.ctc_loss(x.log_softmax(-1), y, a, b)

            yield "losses", f"{name} t{steps} b{batch} v{vocabulary} l{length}", ctc
    for dtype in (torch.float32, torch.bfloat16):
        for name, fn in {
            "bce": lambda x, y: nn.binary_cross_entropy(x.sigmoid(), y.sigmoid()), "bce_none": lambda x, y: nn.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction="none"), "bce_weight": lambda x, y: nn.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=torch.ones(x.shape[1], device=x.device, dtype=x.dtype)), "hinge": lambda x, y: nn.hinge_embedding_loss(x, y.sign()),
            "margin": lambda x, y: nn.margin_ranking_loss(x, y, torch.ones_like(x)), "triplet": lambda x, y: nn.triplet_margin_loss(x, y, y.flip(0)), "cosine": lambda x, y: nn.cosine_embedding_loss(x, y, torch.ones(x.shape[0], device=x.device)), "gaussian": lambda x, y: nn.gaussian_nll_loss(x, y, torch.ones_like(x)), "poisson": lambda x, y: nn.poisson_nll_loss(x, y), "soft_margin": lambda x, y: nn.soft_margin_loss(x, y.detach().sign()),
            "multi_margin": lambda x, y: nn.multi_margin_loss(x, y.argmax(1)), "multilabel": lambda x, y: nn.multilabel_soft_margin_loss(x, y.sigmoid()), "mse_none": lambda x, y: nn.mse_loss(x, y, reduction="none"), "kl": lambda x, y: nn.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), "kl_log": lambda x, y: nn.kl_div(x.log_softmax(-1), y.log_softmax(-1), log_target=True), "soft_targets": lambda x, y: nn.cross_entropy(x, y.softmax(-1)),
            "weighted": lambda x, y: nn.cross_entropy(x, y.argmax(1), weight=torch.ones(x.shape[1], device=x.device, dtype=x.dtype)), "smooth_none": lambda x, y: nn.smooth_l1_loss(x, y, reduction="none").mean(), "pairwise": lambda x, y: nn.pairwise_distance(x, y), "gumbel": lambda x, y: nn.gumbel_softmax(x, hard=True), "mse_both": lambda x, y: nn.mse_loss(x, y), "l1_both": lambda x, y: nn.l1_loss(x, y), "huber": lambda x, y: nn.huber_loss(x, y), "logsigmoid": lambda x, y: nn.logsigmoid(x * y),
            "norm1": lambda x, y: (x - y).norm(1, dim=-1), "norm_inf": lambda x, y: (x - y).norm(float("inf"), dim=-1), "var": lambda x, y: (x * y).var(1), "addmm": lambda x, y: torch.addmm(x[:, :1], x, y[:64].t()), "outer": lambda x, y: torch.outer(x[:, 0], y[0]), "erf": lambda x, y: torch.erf(x), "atan2": lambda x, y: torch.atan2(x, y), "hypot": lambda x, y: torch.hypot(x, y), "lerp": lambda x, y: torch.lerp(x, y, y), "logaddexp": lambda x, y: torch.logaddexp(x, y), "fmod": lambda x, y: torch.fmod(x, 2.0),
        }.items():  # fmt: skip
            yield "losses", f"{name} {str(dtype)[6:]} 1024x2000", lambda device, fn=fn, dtype=dtype: (_plain(torch, (1024, 2000), (1024, 2000), dtype=dtype)(device), fn)
    for rows, columns, width in ((500, 700, 64), (10, 2000, 8), (2048, 2048, 8), (1024, 4096, 256)):
        for name, fn in {"cdist": torch.cdist, "cdist_plain": lambda x, y: torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist"), "cdist1": lambda x, y: torch.cdist(x, y, p=1.0), "cdist_self": lambda x, y: torch.cdist(x, x), "pdist": lambda x, y: torch.pdist(x), "bilinear": lambda x, y: nn.bilinear(x[:8], y[:8], torch.randn(4, x.shape[1], y.shape[1], device=x.device)), "matmul": lambda x, y: x @ y.T, "cosine_all": lambda x, y: nn.cosine_similarity(x[:, None, :4], y[None, :, :4], dim=-1)}.items():
            yield "losses", f"{name} {rows}x{columns}x{width}", lambda device, fn=fn, rows=rows, columns=columns, width=width: (_plain(torch, (rows, width), (columns, width))(device), fn)


def cells(torch):
    nn = torch.nn

    def whole(make, *shapes, dtype=torch.float32, call=lambda net, *x: net(*x)):
        def build(device):
            torch.manual_seed(0)
            net = make().to(device=device, dtype=dtype)
            return _plain(torch, *shapes, dtype=dtype)(device), lambda *x, net=net: call(net, *x)

        return build

    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype)[6:]
        yield "cells", f"lstm_cell {short}", whole(lambda: nn.LSTMCell(256, 512), (64, 256), dtype=dtype)
        yield "cells", f"gru_cell {short}", whole(lambda: nn.GRUCell(256, 512), (64, 256), dtype=dtype)
        yield "cells", f"rnn_cell {short}", whole(lambda: nn.RNNCell(256, 512), (64, 256), dtype=dtype)
        yield "cells", f"weight_norm {short}", whole(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(512, 1024)), (64, 512), dtype=dtype)
        yield "cells", f"spectral_norm {short}", whole(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(512, 1024)), (64, 512), dtype=torch.float32)
        yield "cells", f"transformer {short}", whole(lambda: nn.Transformer(256, 4, 1, 1, 512, batch_first=True), (4, 100, 256), (4, 80, 256), dtype=dtype)
        yield "cells", f"layer_norm_plain {short}", whole(lambda: nn.LayerNorm(512, elementwise_affine=False), (4096, 512), dtype=dtype)
        yield "cells", f"layer_norm_no_bias {short}", whole(lambda: nn.LayerNorm(512, bias=False), (4096, 512), dtype=dtype)
        yield "cells", f"embedding_renorm {short}_ng", whole(lambda: nn.Embedding(1000, 64, max_norm=1.0), (8, 8), dtype=dtype, call=lambda net, x: net(x.abs().long()))
        for name, fn in {
            "bmm": lambda x: torch.bmm(x, x.mT), "einsum3": lambda x: torch.einsum("bij,bkj,bk->bi", x, x, x[:, :, 0]), "einsum_outer": lambda x: torch.einsum("bi,bj->bij", x[:, 0], x[:, 1]), "tensordot": lambda x: torch.tensordot(x, x, dims=([1, 2], [1, 2])), "kron": lambda x: torch.kron(x[0, :16, :16], x[1, :16, :16]), "block_diag": lambda x: torch.block_diag(*x[:4]), "baddbmm": lambda x: torch.baddbmm(x[:, :1], x, x.mT),
            "matmul_expand": lambda x: x[:, None] @ x[None, :1].mT, "dropout": lambda x: nn.functional.dropout(x, 0.3), "alpha_dropout": lambda x: nn.functional.alpha_dropout(x, 0.3, training=True), "repeat": lambda x: x.repeat(2, 1, 1), "repeat_interleave": lambda x: x.repeat_interleave(3, dim=1), "tile": lambda x: x.tile(2), "stack": lambda x: torch.stack([x, x]), "cumsum": lambda x: x.cumsum(1), "unfold": lambda x: x.unfold(1, 4, 2).contiguous(), "tril": lambda x: x.tril(), "clone_t": lambda x: x.mT.contiguous(), "to_float": lambda x: x.float().to(x.dtype), "softmax_dim1": lambda x: x.softmax(1),
            "rotary": lambda x: torch.cat([-x[..., 50:], x[..., :50]], -1) * x.cos() + x * x.sin(), "chunk_mul": lambda x: x.chunk(2, -1)[0] * nn.functional.silu(x.chunk(2, -1)[1]), "split_sum": lambda x: sum(x.split(10, 1)), "logsumexp": lambda x: x.logsumexp((1, 2)), "pow": lambda x: x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * x, "expand_add": lambda x: x + x[:1, :, :1], "index_last": lambda x: x[..., [0, 3, 5]], "masked_fill_inf": lambda x: x.masked_fill(torch.ones(x.shape[1], x.shape[2], dtype=torch.bool, device=x.device).triu(1), float("-inf")).softmax(-1), "movedim": lambda x: x.movedim(0, -1).reshape(-1, x.shape[0]) @ x[:, 0, :3],
        }.items():  # fmt: skip
            yield "cells", f"{name} {short}", lambda device, fn=fn, dtype=dtype: (_plain(torch, (16, 60, 100), dtype=dtype)(device), fn)
    for name, fn in {"abs": lambda z: z.abs(), "angle": lambda z: z.angle(), "mul": lambda z: z * z.conj(), "matmul": lambda z: z @ z.mT, "einsum": lambda z: torch.einsum("bij,jk->bik", z, z[0].mT.contiguous()), "exp": torch.exp, "real": lambda z: (z * z).real, "polar": lambda z: torch.polar(z.real, z.imag), "sum": lambda z: z.sum(0), "mean": lambda z: z.mean(), "norm": lambda z: z.norm(), "solve": lambda z: torch.linalg.solve(z + 99 * torch.eye(60, device=z.device), z)}.items():
        yield "cells", f"complex_{name}", lambda device, fn=fn: ((torch.randn(16, 60, 60, device=device), torch.randn(16, 60, 60, device=device)), lambda x, y, fn=fn: torch.view_as_real(made) if (made := fn(torch.complex(x, y))).is_complex() else made)


def convolutions(torch):
    """Of kinds that operator_cases.py has few of: dilated, not square, transposed, one and three dimensions."""
    nn = torch.nn.functional
    for dtype in (torch.float32, torch.bfloat16):
        for last in (False, True):
            rows = (
                (8, 64, 64, (64, 64), (3, 3), 1, 2, 2, 1), (8, 64, 64, (64, 64), (3, 3), 1, 4, 4, 1), (8, 256, 256, (32, 32), (3, 3), 1, 6, 6, 1), (16, 1, 32, (80, 600), (11, 5), 2, 2, 1, 1), (8, 128, 128, (17, 17), (1, 7), 1, 3, 1, 1), (8, 128, 192, (17, 17), (7, 1), 1, 3, 1, 1), (32, 3, 32, (96, 96), (3, 3), 2, 1, 1, 1),
                (32, 3, 64, (64, 64), (4, 4), 4, 0, 1, 1), (16, 64, 256, (96, 96), (3, 3), 1, 1, 1, 1), (16, 256, 3, (64, 64), (3, 3), 1, 1, 1, 1), (8, 64, 2, (48, 48), (3, 3), 1, 1, 1, 1), (8, 209, 96, (48, 48), (3, 3), 1, 1, 1, 1), (8, 100, 200, (30, 30), (3, 3), 1, 1, 1, 1), (4, 512, 512, (64, 64), (3, 3), 1, 1, 1, 1), (4, 512, 1536, (16, 16), (1, 1), 1, 0, 1, 1),
                (32, 96, 16, (112, 112), (1, 1), 1, 0, 1, 1), (32, 16, 96, (112, 112), (1, 1), 1, 0, 1, 1), (32, 24, 144, (56, 56), (1, 1), 1, 0, 1, 1), (32, 144, 24, (56, 56), (1, 1), 1, 0, 1, 1), (32, 320, 1280, (7, 7), (1, 1), 1, 0, 1, 1), (32, 96, 4, (1, 1), (1, 1), 1, 0, 1, 1), (32, 4, 96, (1, 1), (1, 1), 1, 0, 1, 1), (16, 64, 64, (56, 56), (3, 3), 1, 1, 1, 32), (16, 256, 256, (14, 14), (3, 3), 1, 1, 1, 32),
                (16, 128, 256, (56, 56), (3, 3), 2, 1, 1, 1), (16, 128, 32, (28, 28), (3, 3), 1, 1, 1, 1), (24, 128, 32, (56, 56), (3, 3), 1, 1, 1, 1), (24, 96, 128, (56, 56), (1, 1), 1, 0, 1, 1), (64, 3, 64, (64, 64), (4, 4), 2, 1, 1, 1), (64, 512, 1, (4, 4), (4, 4), 1, 0, 1, 1), (8, 3, 64, (224, 224), (7, 7), 2, 3, 1, 1), (6, 48, 48, (256, 320), (3, 3), 1, 1, 1, 1),
            )  # fmt: skip
            for n, c, k, size, f, d, p, dil, g in rows:
                def build(device, dtype=dtype, last=last, n=n, c=c, k=k, size=size, f=f, d=d, p=p, dil=dil, g=g):
                    x, w = torch.randn(n, c, *size, device=device, dtype=dtype), torch.randn(k, c // g, *f, device=device, dtype=dtype)
                    if last:
                        x, w = x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last)
                    return (x, w), lambda x, w: nn.conv2d(x, w, stride=d, padding=p, dilation=dil, groups=g)

                yield "convs", f"conv2d {str(dtype)[6:]} {'nhwc' if last else 'nchw'} n{n} c{c} k{k} s{size[0]}x{size[1]} f{f[0]}x{f[1]} d{d} p{p} dil{dil} g{g}", build
        for n, c, k, size, f, d, p, dil in ((8, 1, 64, 32000, 15, 1, 7, 1), (8, 64, 64, 32000, 5, 1, 4, 2), (8, 64, 64, 32000, 5, 1, 16, 8), (8, 64, 1, 32000, 15, 1, 7, 1), (8, 512, 512, 500, 3, 2, 1, 1), (4, 1, 512, 64000, 10, 5, 0, 1), (4, 512, 512, 12799, 3, 2, 0, 1), (24, 80, 256, 1200, 5, 2, 2, 1), (16, 256, 512, 100, 1, 1, 0, 1)):
            def build1(device, dtype=dtype, n=n, c=c, k=k, size=size, f=f, d=d, p=p, dil=dil):
                return (torch.randn(n, c, size, device=device, dtype=dtype), torch.randn(k, c, f, device=device, dtype=dtype)), lambda x, w: nn.conv1d(x, w, stride=d, padding=p, dilation=dil)

            yield "convs", f"conv1d {str(dtype)[6:]} n{n} c{c} k{k} s{size} f{f} d{d} p{p} dil{dil}", build1
        for n, c, k, size, f, d, p in ((2, 1, 16, (64, 64, 64), (3, 3, 3), (1, 1, 1), (1, 1, 1)), (2, 16, 16, (64, 64, 64), (3, 3, 3), (1, 1, 1), (1, 1, 1)), (2, 48, 16, (64, 64, 64), (3, 3, 3), (1, 1, 1), (1, 1, 1)), (8, 3, 48, (16, 112, 112), (1, 3, 3), (1, 2, 2), (0, 1, 1)), (8, 48, 48, (16, 56, 56), (3, 1, 1), (2, 1, 1), (1, 0, 0)), (8, 48, 96, (8, 56, 56), (1, 3, 3), (1, 2, 2), (0, 1, 1)), (2, 16, 4, (64, 64, 64), (1, 1, 1), (1, 1, 1), (0, 0, 0)), (4, 3, 768, (8, 112, 112), (2, 16, 16), (2, 16, 16), (0, 0, 0))):
            def build3(device, dtype=dtype, n=n, c=c, k=k, size=size, f=f, d=d, p=p):
                return (torch.randn(n, c, *size, device=device, dtype=dtype), torch.randn(k, c, *f, device=device, dtype=dtype)), lambda x, w: nn.conv3d(x, w, stride=d, padding=p)

            yield "convs", f"conv3d {str(dtype)[6:]} n{n} c{c} k{k} s{'x'.join(map(str, size))} f{'x'.join(map(str, f))} d{d[0]}", build3
        for dims, n, c, k, size, f, d, p in ((3, 2, 64, 64, 16, 2, 2, 0), (1, 8, 512, 256, 100, 4, 2, 1), (1, 8, 256, 128, 400, 16, 8, 4), (2, 32, 64, 128, 32, 4, 2, 1), (2, 32, 128, 3, 64, 4, 2, 1), (2, 4, 512, 256, 16, 2, 2, 0)):
            def buildt(device, dtype=dtype, dims=dims, n=n, c=c, k=k, size=size, f=f, d=d, p=p):
                fn = (nn.conv_transpose1d, nn.conv_transpose2d, nn.conv_transpose3d)[dims - 1]
                return (torch.randn(n, c, *(size,) * dims, device=device, dtype=dtype), torch.randn(c, k, *(f,) * dims, device=device, dtype=dtype)), lambda x, w: fn(x, w, stride=d, padding=p)

            yield "convs", f"conv_transpose{dims}d {str(dtype)[6:]} n{n} c{c} k{k} s{size} f{f} d{d} p{p}", buildt


def cases(torch):
    """All cases, the ones that are known least first."""
    for part in (losses, scattering, cells, algebra, fourier, selecting, pictures, convolutions):
        yield from part(torch)
