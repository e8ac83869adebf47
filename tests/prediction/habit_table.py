"""What notebooks do, one a line: each must run in a fake run as on a GPU. ``torch nn F math tmp`` are there; what is to hold is asserted."""

HABITS = {
    'numpy of a result': "x=torch.randn(8,4,device='cuda'); a=x.detach().cpu().numpy(); assert a.shape==(8,4)",
    'numpy of labels': "x=torch.arange(5,device='cuda'); a=x.cpu().numpy(); assert a.tolist()==[0,1,2,3,4]",
    'np.asarray': "import numpy as np; x=torch.randn(8,4,device='cuda'); a=np.asarray(x.cpu()); assert a.shape==(8,4); np.array(x.detach().cpu())",
    'tolist': "x=torch.arange(5,device='cuda'); assert x.tolist()==[0,1,2,3,4]; y=torch.randn(3,2,device='cuda').tolist(); assert len(y)==3 and len(y[0])==2",
    'from numpy': "import numpy as np; x=torch.from_numpy(np.zeros((4,3),'float32')).cuda(); assert x.device.type=='cuda'; torch.as_tensor(np.arange(3),device='cuda'); torch.tensor(np.ones(3),device='cuda')",
    'workers': """
from torch.utils.data import DataLoader, TensorDataset
d=DataLoader(TensorDataset(torch.randn(32,4),torch.randint(0,3,(32,))),batch_size=8,shuffle=True,num_workers=2,pin_memory=True,persistent_workers=True,prefetch_factor=2)
n=0
for x,y in d:
    x=x.to('cuda',non_blocking=True); n+=1
    assert x.shape==(8,4), x.shape
assert n==4
""",
    'custom dataset with workers': """
import numpy as np
class D(torch.utils.data.Dataset):
    def __len__(self): return 10
    def __getitem__(self,i): return torch.from_numpy(np.random.rand(3,8,8).astype('float32')), int(i%2)
for x,y in torch.utils.data.DataLoader(D(),batch_size=5,shuffle=True,num_workers=4):
    x,y=x.cuda(),y.cuda()
    assert x.shape==(5,3,8,8) and y.shape==(5,)
""",
    'random_split and weights': """
from torch.utils.data import random_split, TensorDataset, WeightedRandomSampler, DataLoader
d=TensorDataset(torch.randn(10,4)); a,b=random_split(d,[8,2],generator=torch.Generator().manual_seed(1))
assert len(a)==8
s=WeightedRandomSampler(torch.ones(10),10)
assert sum(x.shape[0] for x, in DataLoader(d,batch_size=4,sampler=s))==10
""",
    'streams': """
s=torch.cuda.Stream()
with torch.cuda.stream(s):
    x=torch.randn(4,device='cuda')
torch.cuda.current_stream().wait_stream(s); x.record_stream(s); s.synchronize(); torch.cuda.synchronize()
""",
    'events': """
a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
a.record(); x=torch.randn(4,device='cuda'); b.record(); torch.cuda.synchronize(); t=a.elapsed_time(b); assert t>=0
throughput = 1/ (t/1000) if t else 0
""",
    'generator': "g=torch.Generator(device='cuda').manual_seed(1); x=torch.randn(4,4,device='cuda',generator=g); torch.randperm(5,generator=g,device='cuda'); torch.rand(3,device='cuda',generator=g); torch.empty(4,device='cuda').normal_(generator=g)",
    'properties': 'p=torch.cuda.get_device_properties(0); assert p.total_memory>1e11 and p.name; f,t=torch.cuda.mem_get_info(); assert f<=t; torch.cuda.get_device_name(); torch.cuda.get_device_capability(); print(p)',
    'pin_memory': "x=torch.randn(4).pin_memory().to('cuda',non_blocking=True); y=torch.empty(4,pin_memory=True); y.copy_(x); z=torch.zeros(3,pin_memory=True); assert x.device.type=='cuda'",
    'repeat_interleave': "x=torch.randn(3,4,device='cuda'); r=torch.tensor([1,2,3],device='cuda'); y=x.repeat_interleave(r,dim=0); assert y.shape==(6,4); torch.repeat_interleave(x,torch.tensor([2,2,2]).cuda(),dim=0)",
    'packed': """
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
m=nn.LSTM(8,16,batch_first=True).cuda(); x=torch.randn(4,10,8,device='cuda')
p=pack_padded_sequence(x,torch.tensor([10,7,5,2]),batch_first=True); o,(h,c)=m(p); o,l=pad_packed_sequence(o,batch_first=True); assert o.shape==(4,10,16), o.shape
o.sum().backward()
pad_sequence([torch.randn(3,2,device='cuda'),torch.randn(5,2,device='cuda')],batch_first=True)
""",
    'packed not sorted': """
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
m=nn.GRU(8,16,batch_first=True,bidirectional=True).cuda(); x=torch.randn(4,10,8,device='cuda')
lengths=torch.tensor([2,7,10,5],device='cuda')
p=pack_padded_sequence(x,lengths.cpu(),batch_first=True,enforce_sorted=False); o,h=m(p); o,l=pad_packed_sequence(o,batch_first=True,total_length=10); assert o.shape==(4,10,32)
""",
    'sparse embedding': """
e=nn.Embedding(1000,16,sparse=True).cuda(); o=torch.optim.SparseAdam(e.parameters())
for _ in range(2):
    e(torch.randint(0,1000,(32,),device='cuda')).sum().backward(); o.step(); o.zero_grad()
""",
    'flex_attention': """
from torch.nn.attention.flex_attention import flex_attention, create_block_mask
q=torch.randn(1,2,128,64,device='cuda',dtype=torch.bfloat16,requires_grad=True)
m=create_block_mask(lambda b,h,i,j: i>=j,None,None,128,128,device='cuda')
o=flex_attention(q,q,q,block_mask=m); o.sum().backward(); assert o.shape==q.shape
""",
    'flex_attention compiled': """
from torch.nn.attention.flex_attention import flex_attention
flex=torch.compile(flex_attention)
q=torch.randn(1,2,128,64,device='cuda',dtype=torch.bfloat16,requires_grad=True)
o=flex(q,q,q,score_mod=lambda s,b,h,i,j: s+i-j); o.sum().backward()
""",
    'compile': """
m=torch.compile(nn.Sequential(nn.Linear(8,8),nn.GELU()).cuda()); m(torch.randn(4,8,device='cuda')).sum().backward()
@torch.compile
def f(x): return x.sin()+1
f(torch.randn(4,device='cuda'))
@torch.compile(mode='reduce-overhead',fullgraph=True)
def g(x): return x*2
g(torch.randn(4,device='cuda'))
m2=nn.Linear(8,8).cuda(); m2.compile(); m2(torch.randn(4,8,device='cuda'))
""",
    'print loss': "m=nn.Linear(4,1).cuda(); l=m(torch.randn(8,4,device='cuda')).mean(); l.backward(); print(f'{l.item():.3f} {float(l):.2f} {l:.3f} {l}'); print(l, m.weight.grad.norm())",
    'print big': "x=torch.randn(100,100,device='cuda'); print(x); str(x); repr(x); print(x.shape, x.mean().item(), x.max(), x.argmax().item())",
    'tqdm': """
from tqdm import tqdm, trange
from tqdm.auto import tqdm as t2
for i in tqdm(range(3)): pass
p=t2(range(3))
for i in p: p.set_postfix(loss=torch.randn((),device='cuda').item())
""",
    'early stopping': """
best=float('inf'); bad=0; m=nn.Linear(4,1).cuda()
for e in range(5):
    v=m(torch.randn(8,4,device='cuda')).pow(2).mean()
    if v<best: best=v.item(); bad=0
    else: bad+=1
    if bad>=2: break
if torch.isnan(v): raise SystemExit
if not torch.isfinite(v).all(): print('inf')
""",
    'accuracy': "o=torch.randn(8,3,device='cuda'); y=torch.randint(0,3,(8,),device='cuda'); c=(o.argmax(1)==y).sum().item(); a=(o.argmax(1)==y).float().mean().item(); _,p=torch.max(o,1); print(c/8,a,(p==y).sum().cpu().numpy())",
    'memory stats': """
torch.cuda.reset_peak_memory_stats(); a=torch.cuda.memory_allocated(); x=torch.empty(1<<20,device='cuda'); assert torch.cuda.memory_allocated()-a==4<<20
assert torch.cuda.max_memory_allocated()>=4<<20; del x; assert torch.cuda.memory_allocated()==a
s=torch.cuda.memory_summary(); assert 'Allocated' in s; torch.cuda.memory_reserved(); torch.cuda.max_memory_reserved(); torch.cuda.memory_stats()['allocated_bytes.all.peak']; torch.cuda.empty_cache(); torch.cuda.reset_max_memory_allocated(); torch.cuda.memory_cached() if hasattr(torch.cuda,'memory_cached') else 0
torch.cuda.memory_summary(device=None, abbreviated=False); torch.cuda.list_gpu_processes()
""",
    'GradScaler old': """
s=torch.cuda.amp.GradScaler(); m=nn.Linear(4,1).cuda(); o=torch.optim.SGD(m.parameters(),0.1)
with torch.cuda.amp.autocast(): l=m(torch.randn(8,4,device='cuda')).mean()
s.scale(l).backward(); s.unscale_(o); torch.nn.utils.clip_grad_norm_(m.parameters(),1.0); s.step(o); s.update(); print(s.get_scale()); s.state_dict()
""",
    'GradScaler new': """
s=torch.amp.GradScaler('cuda'); m=nn.Linear(4,1).cuda(); o=torch.optim.Adam(m.parameters(),0.1)
with torch.autocast('cuda',dtype=torch.float16): l=m(torch.randn(8,4,device='cuda')).mean()
assert torch.is_autocast_enabled('cuda')==False
s.scale(l).backward(); s.step(o); s.update()
""",
    'half': 'm=nn.Linear(4,1).cuda().half(); assert next(m.parameters()).dtype==torch.float16; m.bfloat16().float(); m.to(dtype=torch.bfloat16)',
    'save and load': """
m=nn.Linear(4,1).cuda(); o=torch.optim.Adam(m.parameters()); m(torch.randn(2,4,device='cuda')).sum().backward(); o.step()
torch.save({'model':m.state_dict(),'opt':o.state_dict(),'epoch':3},tmp + '/kept.pt')
c=torch.load(tmp + '/kept.pt',map_location='cuda'); m.load_state_dict(c['model']); o.load_state_dict(c['opt']); assert c['epoch']==3
c=torch.load(tmp + '/kept.pt',map_location='cpu',weights_only=True); assert c['model']['weight'].device.type=='cpu'
import io; b=io.BytesIO(); torch.save(m.state_dict(),b); b.seek(0); d=torch.load(b); assert d['weight'].shape==(1,4)
import os; assert not os.path.exists(tmp + '/kept.pt')
""",
    'load a real file': "c=torch.load(tmp + '/real.pt',map_location='cuda'); assert c['w'].device.type=='cuda' and c['w'].shape==(3,4); m=nn.Linear(4,3,bias=False); m.load_state_dict({'weight':c['w']}); m.cuda()",
    'seeds': 'torch.manual_seed(0); torch.cuda.manual_seed(0); torch.cuda.manual_seed_all(0); torch.backends.cudnn.deterministic=True; torch.use_deterministic_algorithms(False); import random, numpy; random.seed(0); numpy.random.seed(0); s=torch.cuda.get_rng_state(); torch.cuda.set_rng_state(s); torch.get_rng_state()',
    'backend switches': "torch.backends.cuda.matmul.allow_tf32=True; torch.set_float32_matmul_precision('high'); torch.backends.cudnn.benchmark=True; torch.backends.cudnn.version(); torch.version.cuda; torch.cuda.is_bf16_supported(); torch.backends.cudnn.is_available()",
    'devices': "d=torch.device('cuda:0'); x=torch.randn(2,device=d); assert x.device==d and x.is_cuda; torch.set_default_device('cuda'); y=torch.zeros(3); assert y.is_cuda; torch.set_default_device('cpu'); torch.cuda.set_device(0); torch.cuda.current_device(); torch.cuda.device_count(); x.get_device()",
    'with device': """
with torch.device('cuda'):
    m=nn.Linear(4,4)
assert m.weight.is_cuda
with torch.cuda.device(0):
    x=torch.zeros(2,device='cuda')
""",
    'optimizer before cuda': """
m=nn.Linear(4,4); o=torch.optim.Adam(m.parameters()); m.cuda()
m(torch.randn(2,4,device='cuda')).sum().backward(); o.step(); assert len(o.state)==2, len(o.state)
""",
    'checkpoint': """
from torch.utils.checkpoint import checkpoint
m=nn.Linear(4,4).cuda(); x=torch.randn(2,4,device='cuda',requires_grad=True); checkpoint(m,x,use_reentrant=False).sum().backward(); checkpoint(m,x,use_reentrant=True).sum().backward()
""",
    'EMA and deepcopy': """
import copy; m=nn.Linear(4,4).cuda(); e=copy.deepcopy(m)
with torch.no_grad():
    for a,b in zip(e.parameters(),m.parameters()): a.mul_(0.9).add_(b,alpha=0.1)
from torch.optim.swa_utils import AveragedModel; AveragedModel(m).update_parameters(m)
""",
    'schedulers': "m=nn.Linear(4,4).cuda(); o=torch.optim.SGD(m.parameters(),0.1); s=torch.optim.lr_scheduler.CosineAnnealingLR(o,10); m(torch.randn(2,4,device='cuda')).sum().backward(); o.step(); s.step(); p=torch.optim.lr_scheduler.ReduceLROnPlateau(o); p.step(torch.randn((),device='cuda').item()); p.step(torch.randn((),device='cuda')); print(s.get_last_lr())",
    'data parallel': "m=nn.DataParallel(nn.Linear(4,4)).cuda(); m(torch.randn(2,4,device='cuda')).sum().backward()",
    'profiler off': """
torch.cuda.nvtx.range_push('a'); torch.cuda.nvtx.range_pop()
with torch.profiler.record_function('x'):
    torch.randn(3,device='cuda')
""",
    'anomaly': """
with torch.autograd.set_detect_anomaly(True):
    m=nn.Linear(4,4).cuda(); m(torch.randn(2,4,device='cuda')).sum().backward()
""",
    'boolean index': "x=torch.randn(4,4,device='cuda'); y=x[x>0]; z=x.masked_fill(x>0,0); n=torch.nonzero(x>0).shape; torch.where(x>0); x[x<0]=0",
    'unique and bincount': "x=torch.randint(0,5,(20,),device='cuda'); torch.unique(x); torch.bincount(x,minlength=5); torch.histc(x.float(),5); x.unique(return_counts=True)",
    'no_grad eval': """
m=nn.Sequential(nn.Linear(4,4),nn.Dropout(),nn.BatchNorm1d(4)).cuda().eval()
with torch.inference_mode(): m(torch.randn(2,4,device='cuda')).softmax(-1).topk(2)
""",
    'transformer encoder eval': """
m=nn.TransformerEncoder(nn.TransformerEncoderLayer(16,2,32,batch_first=True),2).cuda().eval()
with torch.inference_mode(): m(torch.randn(2,5,16,device='cuda'),src_key_padding_mask=torch.zeros(2,5,dtype=torch.bool,device='cuda'))
""",
    'svd and solve': "x=torch.randn(4,4,device='cuda'); torch.linalg.svd(x); torch.linalg.solve(x,x); torch.linalg.inv(x); torch.linalg.eigh(x@x.T); torch.fft.rfft(x)",
    'fused sgd': "m=nn.Linear(4,4).cuda(); o=torch.optim.SGD(m.parameters(),0.1,momentum=0.9,fused=True); m(torch.randn(2,4,device='cuda')).sum().backward(); o.step()",
    'dlpack': "x=torch.randn(3,device='cuda'); x.cpu(); torch.Tensor([1,2]).cuda(); torch.cuda.FloatTensor(3,4) if hasattr(torch.cuda,'FloatTensor') else 0; torch.FloatTensor([1.,2.]).cuda(); torch.LongTensor([1]).to('cuda')",
    'set default tensor type': "torch.set_default_dtype(torch.float32); x=torch.tensor(3.0,device='cuda'); x.item(); int(torch.tensor(3,device='cuda')); bool(torch.tensor(True,device='cuda')); [1,2,3][torch.tensor(1,device='cuda')]; range(torch.tensor(3,device='cuda'))",
    'iterate': "x=torch.randn(3,4,device='cuda'); [r.sum() for r in x]; a,b,c=x; len(x); max(torch.arange(3,device='cuda')); sorted(torch.arange(3,device='cuda').tolist()); sum(x)",
    'in and hash': "x=torch.arange(3,device='cuda'); assert 2 in x; torch.equal(x,x); torch.allclose(x.float(),x.float()); (x==x).all(); d={x:1}",
    'hooks': "m=nn.Linear(4,4).cuda(); h=m.register_forward_hook(lambda m,i,o: print(o.mean().item())); m.register_full_backward_hook(lambda m,gi,go: None); m(torch.randn(2,4,device='cuda',requires_grad=True)).sum().backward(); h.remove()",
    'weight norm and spectral': "from torch.nn.utils.parametrizations import weight_norm, spectral_norm; m=weight_norm(nn.Linear(4,4)).cuda(); m(torch.randn(2,4,device='cuda')).sum().backward(); s=spectral_norm(nn.Linear(4,4)).cuda(); s(torch.randn(2,4,device='cuda'))",
    'multinomial sampling': "p=torch.softmax(torch.randn(2,10,device='cuda'),-1); t=torch.multinomial(p,1); torch.cat([t,t],1); torch.distributions.Categorical(p).sample(); torch.bernoulli(p); torch.distributions.Normal(torch.zeros(2,device='cuda'),torch.ones(2,device='cuda')).rsample()",
    'cdist knn': "x=torch.randn(10,3,device='cuda'); torch.cdist(x,x).topk(3,largest=False).indices; x.cpu().numpy().mean()",
    'multiprocessing share': 'x=torch.randn(3); x.share_memory_(); m=nn.Linear(2,2); m.share_memory()',
    'cuda graph': """
g=torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    y=torch.randn(3,device='cuda')+1
g.replay()
""",
    'distributed off': 'import torch.distributed as dist; dist.is_available(); dist.is_initialized()',
    'jit': "m=torch.jit.script(nn.Linear(4,4)).cuda(); m(torch.randn(2,4,device='cuda')); t=torch.jit.trace(nn.Linear(4,4).cuda(),torch.randn(2,4,device='cuda')); t(torch.randn(2,4,device='cuda'))",
    'record history': "torch.cuda.memory._record_memory_history(); x=torch.zeros(3,device='cuda'); torch.cuda.memory._snapshot(); torch.cuda.memory._record_memory_history(enabled=None)",
    'apex-like init': "m=nn.Linear(4,4).cuda(); nn.init.xavier_uniform_(m.weight); nn.init.orthogonal_(m.weight); nn.init.trunc_normal_(m.weight); m.apply(lambda l: None); m.weight.data.normal_(0,0.02); m.weight.data=torch.zeros(4,4,device='cuda'); m.zero_grad(); sum(p.numel() for p in m.parameters()); m.weight.data.fill_(1)",
    'params data cuda': """
m=nn.Linear(4,4)
for p in m.parameters(): p.data=p.data.cuda()
m(torch.randn(2,4,device='cuda'))
""",
    'accelerator': "torch.accelerator.current_accelerator(); torch.accelerator.is_available(); torch.randn(2,device=torch.accelerator.current_accelerator()); torch.accelerator.memory_allocated() if hasattr(torch.accelerator,'memory_allocated') else 0; torch.accelerator.synchronize()",
    'grad': "x=torch.randn(3,device='cuda',requires_grad=True); g,=torch.autograd.grad((x**2).sum(),x,create_graph=True); g.sum().backward(); torch.func.grad(lambda t: (t**2).sum())(x); torch.autograd.functional.jacobian(lambda t: t*2, x)",
    'transformers': """
import os
from transformers import GPT2Config, GPT2LMHeadModel
m = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=1000, bos_token_id=1, eos_token_id=999, pad_token_id=999)).cuda()
ids = torch.randint(1, 1000, (2, 16), device='cuda'); out = m(ids, labels=ids); out.loss.backward(); assert out.loss.item()
assert m.eval().generate(ids, max_new_tokens=4, do_sample=False).shape == (2, 20)
m.save_pretrained(tmp + '/model'); assert not os.path.exists(tmp + '/model')
""",
}
