import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.datasets import three_gaussians

distributed.init_process_group("gloo")  # or "nccl"
rank, size = distributed.get_rank(), distributed.get_world_size()
data = three_gaussians(12, dim=5)
X, y = data.inputs, data.labels
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
for layer in (net[0], net[2], net):
    fully_shard(layer)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)

with epk.Recorder(net, optimizer, X, y) as recorder:  # recorder
    for batch in torch.randperm(36).split(12):
        batch = batch[rank::size]
        optimizer.zero_grad()
        F.cross_entropy(net(X[batch]), y[batch]).backward()
        recorder.batch(batch)  # recorder: of this rank
        optimizer.step()

if rank == 0:
    parts = epk.attribute(recorder.trajectory, X[:2] + 0.1)
    print(f"certified {parts.certified}, {recorder.num_steps} steps")
distributed.destroy_process_group()
